"""Evidence of what every script did: an append-only, hash-chained, signed log; verifying, querying and replaying it."""
