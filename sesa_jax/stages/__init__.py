"""The stages of the method. None imports another; the loop joins them."""
