"""Checkpoints of an engine: written in any layout, read in any other.

Reading order: `format` (files), `unpickle` and `reader` (reading them safely), `parts` (what of the model and the
optimizer is which box of which tensor), `saver` (saving in the background), `loader`.
"""
