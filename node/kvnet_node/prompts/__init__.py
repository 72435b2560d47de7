"""What a prompt is made of, and what keeps two prompts from sharing their beginning. Pure functions, no engine."""
