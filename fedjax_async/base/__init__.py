"""What all rooms share: checks, pytrees, factories and specs, the text of names, files, fingerprints."""
