"""Token memories: what followed contexts similar to the current one."""
