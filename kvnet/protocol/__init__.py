"""What peers say and when: sans-I/O, `now` and randomness come in as arguments."""
