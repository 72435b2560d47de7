"""The runnable kvnet node: the command line and the composition root."""
