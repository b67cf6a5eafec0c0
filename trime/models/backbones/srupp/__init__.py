"""SRU++ (Lei 2021): attention feeds a fast recurrence."""
