"""What runs tell: results.json, tables, pictures, pages, comparisons, the ledger of published figures."""
