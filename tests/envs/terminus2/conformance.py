"""terminus-2's reply formats as a table: a reply, and what it must lead to.

Commands are (keystrokes, seconds); an error or a warning is a part of what is said. Restated from the behaviour of
Harbor 0.25; "ours -" marks a stricter rule.
"""

from dataclasses import dataclass

AUTO = "AUTO-CORRECTED: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One reply and its reading."""

    shows: str
    reply: str
    commands: tuple[tuple[str, float], ...] = ()
    is_complete: bool = False
    error: str = ""
    warnings: tuple[str, ...] = ()


LS = ("ls\n", 0.1)


def _json(commands: str = '[{"keystrokes": "ls\\n", "duration": 0.1}]', rest: str = "") -> str:
    return '{"analysis": "a", "plan": "p", "commands": ' + commands + rest + "}"


def _xml(commands: str = '<keystrokes duration="0.1">ls\n</keystrokes>', rest: str = "") -> str:
    sections = f"<analysis>a</analysis>\n<plan>p</plan>\n<commands>\n{commands}\n</commands>\n{rest}"
    return f"<response>\n{sections}</response>"


JSON_ROWS = (
    Row(shows="a clean reply", reply=_json(), commands=(LS,)),
    Row(shows="a tmux key name", reply=_json('[{"keystrokes": "C-c", "duration": 2}]'), commands=(("C-c", 2.0),)),
    Row(shows="a wait", reply=_json('[{"keystrokes": "", "duration": 10.0}]'), commands=(("", 10.0),)),
    Row(shows="no commands", reply=_json("[]")),
    Row(shows="completion", reply=_json("[]", ', "task_complete": true'), is_complete=True),
    Row(shows="completion in words", reply=_json("[]", ', "task_complete": "YES"'), is_complete=True),
    Row(shows="completion denied in words", reply=_json("[]", ', "task_complete": "no"')),
    Row(
        shows="completion of another type",
        reply=_json("[]", ', "task_complete": 1'),
        is_complete=True,
        warnings=("'task_complete'",),
    ),
    Row(shows="completion left open", reply=_json("[]", ', "task_complete": null')),
    Row(shows="text before", reply="Sure. " + _json(), commands=(LS,), warnings=("Extra text detected before",)),
    Row(shows="text after", reply=_json() + " ok", commands=(LS,), warnings=("Extra text detected after",)),
    Row(
        shows="two objects: the first counts",
        reply=_json() + _json("[]"),
        commands=(LS,),
        warnings=("Extra text detected after",),
    ),
    Row(
        shows="a code fence",
        reply=f"```json\n{_json()}\n```",
        commands=(LS,),
        warnings=("Extra text detected before", "Extra text detected after"),
    ),
    Row(
        shows="braces within a string",
        reply=_json('[{"keystrokes": "}{\\"", "duration": 1}]'),
        commands=(('}{"', 1.0),),
    ),
    Row(
        shows="fields in another order",
        reply='{"plan": "", "analysis": "", "commands": []}',
        warnings=("wrong order",),
    ),
    Row(
        shows="analysis that is no string",
        reply='{"analysis": 1, "plan": "", "commands": []}',
        warnings=("'analysis' should be a string",),
    ),
    Row(
        shows="a missing duration",
        reply=_json('[{"keystrokes": "ls\\n"}]'),
        commands=(("ls\n", 1.0),),
        warnings=("missing duration",),
    ),
    Row(
        shows="an invalid duration",
        reply=_json('[{"keystrokes": "ls\\n", "duration": "2"}]'),
        commands=(("ls\n", 1.0),),
        warnings=("invalid duration",),
    ),
    Row(
        shows="ours - a negative duration",
        reply=_json('[{"keystrokes": "ls\\n", "duration": -2}]'),
        commands=(("ls\n", 1.0),),
        warnings=("invalid duration",),
    ),
    Row(
        shows="an unknown field of a command",
        reply=_json('[{"keystrokes": "ls\\n", "duration": 0.1, "enter": true}]'),
        commands=(LS,),
        warnings=("unknown fields: enter",),
    ),
    Row(
        shows="a command that joins the next",
        reply=_json('[{"keystrokes": "l", "duration": 1}, {"keystrokes": "s\\n", "duration": 1}]'),
        commands=(("l", 1.0), ("s\n", 1.0)),
        warnings=("Command 1 should end with a newline",),
    ),
    Row(shows="no JSON", reply="I am done.", error="No valid JSON object found"),
    Row(shows="invalid JSON", reply="{'analysis': 1}", error="Invalid JSON"),
    Row(shows="missing fields", reply='{"analysis": ""}', error="Missing required fields: plan, commands"),
    Row(shows="commands that are no list", reply=_json("{}"), error="'commands' must be a list"),
    Row(shows="a command that is no object", reply=_json('["ls"]'), error="Command 1 must be an object"),
    Row(shows="a command without keystrokes", reply=_json('[{"duration": 1}]'), error="'keystrokes' is missing"),
    Row(
        shows="keystrokes that are no string", reply=_json('[{"keystrokes": 3}]'), error="'keystrokes' must be a string"
    ),
    Row(
        shows="one bad command stops all",
        reply=_json('[{"keystrokes": "ls\\n", "duration": 1}, 3]'),
        error="Command 2 must be an object",
    ),
    Row(
        shows="a bad command of a complete reply",
        reply=_json('["ls"]', ', "task_complete": true'),
        is_complete=True,
        warnings=("Command 1 must be an object",),
    ),
    Row(
        shows="a missing closing brace",
        reply=_json()[:-1],
        commands=(LS,),
        warnings=(AUTO + "closed unbalanced braces",),
    ),
    Row(
        shows="an object within broken text",
        reply="{so} " + _json(),
        commands=(LS,),
        warnings=(AUTO + "extracted JSON from mixed content",),
    ),
)

XML_ROWS = (
    Row(shows="a clean reply", reply=_xml(), commands=(LS,)),
    Row(
        shows="keystrokes are taken byte for byte",
        reply=_xml('<keystrokes duration="1">  if (a < b && c > d) "x"\n</keystrokes>'),
        commands=(('  if (a < b && c > d) "x"\n', 1.0),),
    ),
    Row(shows="a wait", reply=_xml('<keystrokes duration="10.0"></keystrokes>'), commands=(("", 10.0),)),
    Row(
        shows="completion",
        reply=_xml(rest="<task_complete> TRUE </task_complete>\n"),
        commands=(LS,),
        is_complete=True,
    ),
    Row(shows="completion by another word", reply=_xml(rest="<task_complete>yes</task_complete>"), commands=(LS,)),
    Row(shows="an empty claim", reply=_xml(rest="<task_complete/>"), commands=(LS,)),
    Row(shows="empty commands", reply=_xml(""), warnings=("<commands> section is empty",)),
    Row(
        shows="self-closing commands",
        reply="<response><analysis/><plan/><commands/></response>",
        warnings=("<commands> section is empty",),
    ),
    Row(
        shows="empty commands of a complete reply",
        reply=_xml("", "<task_complete>true</task_complete>"),
        is_complete=True,
    ),
    Row(
        shows="missing commands of a complete reply",
        reply="<response><analysis/><plan/><task_complete>true</task_complete></response>",
        is_complete=True,
        warnings=("Missing <commands> section",),
    ),
    Row(
        shows="missing commands",
        reply="<response><analysis/><plan/></response>",
        error="Missing <commands> section",
        warnings=("Missing <commands> section",),
    ),
    Row(
        shows="missing analysis and plan",
        reply='<response><commands><keystrokes duration="0.1">ls\n</keystrokes></commands></response>',
        commands=(LS,),
        warnings=("Missing <analysis> section", "Missing <plan> section"),
    ),
    Row(shows="no response", reply="ls", error="No <response> tag found"),
    Row(shows="an empty response", reply="<response> </response>", error="No <response> tag found"),
    Row(shows="a response that is not closed", reply=_xml().removesuffix("</response>"), commands=(LS,)),
    Row(
        shows="text around",
        reply=f"Sure.\n{_xml()}\nDone.",
        commands=(LS,),
        warnings=("Extra text detected before", "Extra text detected after"),
    ),
    Row(
        shows="two responses: the first counts",
        reply=_xml() + _xml(""),
        commands=(LS,),
        warnings=("Extra text detected after", "only issue one <response> block at a time; of 2"),
    ),
    Row(
        shows="two blocks of commands: the first counts",
        reply=_xml(rest='<commands><keystrokes duration="1">rm\n</keystrokes></commands>'),
        commands=(LS,),
        warnings=("only issue one <commands> block at a time; of 2",),
    ),
    Row(shows="two plans", reply=_xml(rest="<plan>q</plan>"), commands=(LS,), warnings=("Several <plan> sections",)),
    Row(
        shows="an unknown tag",
        reply=_xml(rest="<thought>hm</thought>"),
        commands=(LS,),
        warnings=("Unknown tag <thought>",),
    ),
    Row(
        shows="sections in another order",
        reply="<response><plan/><analysis/><commands/></response>",
        warnings=("wrong order: plan, analysis, commands", "<commands> section is empty"),
    ),
    Row(
        shows="a missing duration",
        reply=_xml("<keystrokes>ls\n</keystrokes>"),
        commands=(("ls\n", 1.0),),
        warnings=("missing duration",),
    ),
    Row(
        shows="an invalid duration",
        reply=_xml('<keystrokes duration="soon">ls\n</keystrokes>'),
        commands=(("ls\n", 1.0),),
        warnings=("invalid duration 'soon'",),
    ),
    Row(
        shows="ours - a duration that is not finite",
        reply=_xml('<keystrokes duration="inf">ls\n</keystrokes>'),
        commands=(("ls\n", 1.0),),
        warnings=("invalid duration 'inf'",),
    ),
    Row(
        shows="a duration without quotes",
        reply=_xml("<keystrokes duration=0.1>ls\n</keystrokes>"),
        commands=(("ls\n", 1.0),),
        warnings=('must be in quotes: duration="0.1"', "missing duration"),
    ),
    Row(
        shows="a duration in single quotes",
        reply=_xml("<keystrokes duration='0.1'>ls\n</keystrokes>"),
        commands=(LS,),
        warnings=("use double quotes",),
    ),
    Row(
        shows="an unknown attribute",
        reply=_xml('<keystrokes duration="0.1" enter="1">ls\n</keystrokes>'),
        commands=(LS,),
        warnings=("unknown attribute enter",),
    ),
    Row(
        shows="a command that joins the next",
        reply=_xml('<keystrokes duration="1">l</keystrokes><keystrokes duration="1">s\n</keystrokes>'),
        commands=(("l", 1.0), ("s\n", 1.0)),
        warnings=("Command 1 should end with a newline",),
    ),
    Row(
        shows="entities are not decoded",
        reply=_xml('<keystrokes duration="0.1">a &amp;&amp; b\n</keystrokes>'),
        commands=(("a &amp;&amp; b\n", 0.1),),
        warnings=("&amp; is typed as it stands",),
    ),
    Row(
        shows="a spelled-out line end",
        reply=_xml('<keystrokes duration="0.1">ls\\r\\n</keystrokes>'),
        commands=(("ls\\r\\n", 0.1),),
        warnings=("\\r\\n is typed as it stands",),
    ),
)
