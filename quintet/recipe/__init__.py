"""Typed configuration: schema, loading, overrides, rules across fields."""
