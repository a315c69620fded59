"""The keywords that apply other schemas to the same value: `allOf`, `if`, `not` and their like."""

from handlers.guides.json_schemas.disjoint import are_disjoint
from handlers.guides.json_schemas.fault import SchemaFault
from handlers.guides.json_schemas.keywords import DEPENDENT, NO_RULES
from handlers.guides.json_schemas.negations import Negations
from handlers.guides.json_schemas.objects import closed, has_all_names
from handlers.guides.json_schemas.one_of import OneOfReader
from handlers.guides.json_schemas.patterns import num_patterns
from handlers.guides.json_schemas.references import References
from handlers.guides.json_schemas.subschema import ReadSchema, Schema, Subschema
from handlers.guides.json_schemas.values import check_value, names_in

MAX_PATTERNS_TOGETHER = 4


class ApplicatorReader:
    def __init__(self, read: ReadSchema, references: References, negations: Negations) -> None:
        self._read = read
        self._references = references
        self._negations = negations
        self._one_of = OneOfReader(read, references.resolve, negations)

    def add_rules(
        self, subschema: Subschema, followed: Schema, besides: list[Schema | bool]
    ) -> None:
        """Add what other schemas say of the value to `followed`, after those in `besides`."""
        keywords = subschema.keywords
        # A schema that is applied is alone too where this one says nothing else.
        is_alone = subschema.is_alone and _has_one_rule(keywords)
        parts = list(besides)
        for keyword in ("allOf", "anyOf", "oneOf"):
            if keyword in keywords:
                parts += self._branches(subschema, keyword, is_alone=is_alone)

        parts += self._dependent(subschema)

        if "if" in keywords and keywords.keys() & {"then", "else"}:
            parts.append(self._condition(subschema))

        if "not" in keywords:
            parts.append(self._negated(subschema))

        if parts:
            followed["allOf"] = parts

        if num_patterns(followed) > MAX_PATTERNS_TOGETHER:
            raise SchemaFault(f"allOf with more than {MAX_PATTERNS_TOGETHER} patterns")

        if "$ref" in keywords:
            name = self._references.name_of(keywords["$ref"], is_alone=is_alone)
            followed["$ref"] = f"#/$defs/{name}"

    def _branches(
        self, subschema: Subschema, keyword: str, *, is_alone: bool
    ) -> list[Schema | bool]:
        branches = subschema.keywords[keyword]
        if not branches:
            raise SchemaFault(f"{keyword} of a wrong type")

        if keyword == "oneOf":
            return [{"anyOf": self._one_of.branches_of(subschema, is_alone=is_alone)}]

        is_single = keyword == "anyOf" or len(branches) == 1
        parts = []
        for number, branch in enumerate(branches):
            pointer = f"{subschema.pointer}/{keyword}/{number}"
            parts.append(self._read(branch, pointer, is_alone=is_alone and is_single))

        return parts if keyword == "allOf" else [{"anyOf": parts}]

    def _dependent(self, subschema: Subschema) -> list[Schema | bool]:
        """The rules of objects that have one property and then need something else."""
        rules: list[Schema | bool] = []
        for keyword in DEPENDENT:
            for name, needed in subschema.keywords.get(keyword, {}).items():
                needs: Schema | bool
                if isinstance(needed, list):
                    needs = {"required": names_in(needed, keyword)}
                else:
                    pointer = f"{subschema.pointer}/{keyword}/{name}"
                    needs = self._read(needed, pointer, is_alone=False)

                check_value(name)
                has_not = {"properties": {name: False}}
                has_it = {"allOf": [{"required": [name]}, needs]}
                rules.append({"anyOf": [has_not, has_it]})

        return rules

    def _negated(self, subschema: Subschema) -> Schema:
        """Schemas of values that do not fit `not`, of which a value must fit one."""
        context = subschema.context
        if subschema.is_alone and has_all_names(subschema.keywords):
            context = closed(context)

        negations = self._negations.of(subschema.keywords["not"], context)
        if not negations:
            raise SchemaFault("not")

        return self._any_of(negations, f"{subschema.pointer}/not")

    def _condition(self, subschema: Subschema) -> Schema:
        """The schemas of `then` and `else`, each with what the value must be like for it."""
        condition = subschema.keywords["if"]
        context = subschema.context
        choices: list[Schema] = []
        if not are_disjoint(condition, context, self._references.resolve):
            choices.append({"allOf": [condition, subschema.keywords.get("then", True)]})

        for negation in self._negations.of(condition, context):
            choices.append({"allOf": [negation, subschema.keywords.get("else", True)]})

        return self._any_of(choices, f"{subschema.pointer}/if")

    def _any_of(self, schemas: list[Schema], pointer: str) -> Schema:
        return {"anyOf": [self._read(schema, pointer, is_alone=False) for schema in schemas]}


def _has_one_rule(keywords: Schema) -> bool:
    rules = keywords.keys() - NO_RULES
    if keywords.get("type") == "object":
        rules -= {"type"}

    return len(rules) == 1
