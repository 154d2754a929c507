"""Search engines behind one method, `types.SearchEngine.search`."""
