"""The engine of pflsim: messages, fusion, server rules, the round and its records. Knows neither Ray nor Lightning."""
