"""Programs for maintainers: no part of the package, nor of its tests."""
