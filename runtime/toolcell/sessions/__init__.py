"""Sessions: a sandbox that stays, so that names, imports and files live from one script to the next."""
