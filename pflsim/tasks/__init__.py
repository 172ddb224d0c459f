"""What is predicted and how it is judged: classification, multilabel, regression."""
