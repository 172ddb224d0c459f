"""What a run leaves on the disk: its folder, and the tracker that writes everything in it."""
