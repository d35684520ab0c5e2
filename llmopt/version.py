"""The version of the package; the build reads it from here, so it is written once."""

__version__ = "0.1.0"
