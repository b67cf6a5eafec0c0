"""The configuration: type, default, bounds and help of every setting, and their checks; no heavy package is imported here."""
