"""The sections of a recipe, by theme; `quintet.recipe.schema` has them all."""
