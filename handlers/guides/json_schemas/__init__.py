"""Writes a client's JSON schema so that llguidance follows all of it, or refuses it. Written
against llguidance 1.9.1.

Where no other schema says something of the same value, it is read narrowly: `properties` without
`type` mean an object, `items` an array, and an object has only the properties that have a name,
unless the schema says something of others. A `format` that llguidance does not know is dropped, as
the specification allows, and so is a word that is no keyword.

What llguidance cannot leave out (`not`, `if`, a `oneOf` whose schemas share values) is left out by
schemas of other values, from `negations.py`. Those are not all that there are: an answer is always
valid, but some valid values cannot be written. The same holds of `contains` in `arrays.py` and of
`uniqueItems` in `unique_items.py`.

`reader.py` reads a schema and what is in it: values and types first, then objects, arrays and the
keywords that combine schemas, each with the reader of its own file.
"""
