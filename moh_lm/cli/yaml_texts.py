"""A YAML loader whose values are the texts of a command line, for ``--config``."""

import yaml


class Switch(str):
    """The text of a plain true, false, yes, no, on or off, which may be a name, such as Norway's."""


class Texts(yaml.SafeLoader):
    """A safe YAML loader that keeps values as they are written: 12:30 is not 750, and 1.10 is not 1.1.

    A key that is given twice in a mapping is an error, not the later value.
    """

    yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in found if tag.rpartition(":")[2] in ("bool", "null", "merge")]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node, deep=False):
        names = [key.value for key, _ in node.value]
        if twice := [name for name in names if names.count(name) > 1]:
            raise yaml.YAMLError(f"{twice[0]} is given twice")
        return super().construct_mapping(node, deep)


def switch(loader, node):
    loader.construct_yaml_bool(node)  # raises KeyError for another text with the tag !!bool
    return Switch(node.value)


Texts.add_constructor("tag:yaml.org,2002:bool", switch)


def as_texts(value, is_list):
    """Return the text or texts that stand for a YAML value on the command line."""
    if isinstance(value, dict):
        return [f"{name}={weight}" for name, weight in value.items()]
    if isinstance(value, list):
        return list(map(str, value))
    return [str(value)] if is_list else str(value)
