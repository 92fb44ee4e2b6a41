"""Typed configuration: schema, loading, overrides, rules across fields.

`loader.load_recipe` and `loader.dump_resolved` are the way in and out. No module costs torch, and a process that scores rewards
needs `user_code` alone.
"""
