"""What local logs of agents and of requests say about prompts sent again. Offline; text is hashed and let go of."""
