"""kvnet: portable, verifiable KV-cache artifacts."""

__version__ = "0.1.0"
