"""Networks in two parts, body and head. Plain torch modules that know nothing of clients."""
