"""Numbers computed with the published code; the folder is named by TRIME_GOLDEN."""
