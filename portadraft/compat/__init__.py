"""For those who come from other libraries: their models, their calls. See docs/applications.md."""
