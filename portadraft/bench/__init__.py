"""Measuring: the demo, and how far drafted text agrees with plain decoding."""
