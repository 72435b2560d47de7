"""Everything a verb does to a data directory, as functions that run in the node or in the verb's own process."""
