"""Check every number printed in a page against the JSON that it was taken from (``make check-numbers``)."""
