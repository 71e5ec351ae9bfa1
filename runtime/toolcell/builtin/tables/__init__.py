"""Tables of the wild: read from files and text in bounded memory, filtered, aggregated and transformed."""
