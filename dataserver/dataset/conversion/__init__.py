"""Other formats rewritten as plain tars, which are read everywhere at the least cost."""
