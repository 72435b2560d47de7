"""The runnable node: command line, configuration, control socket and composition of the library."""
