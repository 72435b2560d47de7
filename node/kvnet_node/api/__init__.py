"""The HTTP endpoint of a running node: what OpenAI- and Anthropic-style clients talk to."""
