"""The images that containers are made of: naming, building and checking them."""
