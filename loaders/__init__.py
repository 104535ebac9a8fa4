"""Move data: fetch documents, lay out THD batches, plan ahead, resume."""
