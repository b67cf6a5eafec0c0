"""Pictures of runs, drawn with Matplotlib."""
