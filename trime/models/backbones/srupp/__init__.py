"""SRU++ (Lei 2021): attention that feeds a fast recurrence."""
