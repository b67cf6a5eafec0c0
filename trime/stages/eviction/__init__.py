"""Recording a run and replaying eviction policies over it."""
