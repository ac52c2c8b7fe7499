"""`vision bench`: ours and the peers in turn, in one run, after their outputs have been compared."""
