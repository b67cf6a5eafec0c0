"""Reports of runs: tables, pictures, pages and comparisons, all made from results.json."""
