"""What is asked of a swarm: recorded traces, generated requests, and who is there when."""
