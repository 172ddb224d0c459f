"""Which client lives on which actor, what each actor requests, and on which node it runs."""
