"""What happens to the messages of clients on their way to the server."""
