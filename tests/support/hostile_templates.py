"""Chat templates that freeze a renderer, fill memory or reach for Python, by what they do."""

LOOP = "{% for a in range(99999) %}"
NESTED = "{% set ns = namespace(x=['x' * 1000]) %}"
NESTED += "{% for i in range(26) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
DOUBLED = "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(64) %}"
DOUBLED += "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
# no constants, which Jinja would compute when it compiles
NUMBERS = "{% set x = ('f' * 1000000 * messages|length)|int(0, 16) %}"
NUMBERS += "{% set y = ('e' * 500000 * messages|length)|int(0, 16) %}"
WORDS = "['word ' * 100000] * 100000"

# One call of C code, or a chain of filters: no loop of the template's own could be counted.
ONE_CALL = {
    "equality of nested lists": DOUBLED + "{% if ns.a == ns.b %}x{% endif %}",
    "order of nested lists": DOUBLED + "{% if ns.a < ns.b %}x{% endif %}",
    "nested list in a list": DOUBLED + "{% if ns.a in [ns.b] %}x{% endif %}",
    "sort of nested lists": DOUBLED + "{{ [ns.a, ns.b]|sort|length }}",
    "lists of long ranges": "{{ (([range(99999)] * 1000000)|map('list')|list)|length }}",
    "lists of long lists": "{{ (([[0] * 1000000] * 1000)|map('list')|list)|length }}",
    "upper of long strings": "{{ ((['x' * 1000000] * 1000000)|map('upper')|list)|length }}",
    "escape of long strings": "{{ ((['x' * 1000000] * 1000000)|map('e')|list)|length }}",
    "words of long strings": "{{ ((" + WORDS + ")|map('wordcount')|list)|length }}",
    "sum of lists": "{{ (([[0] * 1000000] * 1000000)|sum(start=[]))|length }}",
    "remainders of large integers": NUMBERS + "{% set z = x % y %}" * 400,
    "quotients of large integers": NUMBERS + "{% set z = x // y %}" * 400,
    "slices": "{% set a = [0] * 1000000 %}{% set ns = namespace(x=[]) %}"
    "{% for i in range(9999) %}{% set ns.x = ns.x + [a[:]] %}{% endfor %}",
    "thousands of upper": "{% set s = 'x' * 10000000 %}" + "{% set t = s.upper() %}" * 5000,
    "unique": "{{ (range(99999)|map('string')|list * 999)|unique|list|length }}",
}
LOOPS = {
    "endless loop": LOOP + LOOP + "{% endfor %}{% endfor %}",
    "endless output": LOOP + LOOP + "x{% endfor %}{% endfor %}",
    "formatted": "{{ '{:1000000000}'.format('x') }}",
    "formatted by value": "{{ '{:{}}'.format('x', 10**9) }}",
    "formatted often": "{{ ('{0}' * 10**5).format('x' * 10**5) }}",
    "formatted by %": "{{ '%1000000000d' % 1 }}",
    "recursion": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "bushy recursion": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "recursive loop": "{% for a in [[1]] recursive %}{{ loop([a, a]) }}{% endfor %}",
    "long range": "{{ range(10**9) | list }}",
    "repeated": "{{ 'x' * 10**10 }}",
    "repeated list": "{{ [0] * 10**10 }}",
    "output of a gigabyte": "{{ 'x' * 10**9 }}",
    "powers": "{{ 10**(10**10) }}",
    "constants when compiling": "{{ 'x' * 10**8 * 10**8 }}",
    "products": "{% set ns = namespace(x=3) %}{% for i in range(99) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubled by ~": "{% set x = 'xxxxxxxx' %}" + "{% set x = x ~ x %}" * 40,
    "doubled in blocks": "{% set x = 'xxxxxxxx' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40,
    "replaced": "{% set x = 'x' * 1000 %}" + "{% set x = x.replace('x', x) %}" * 4,
    "joined by filter": "{% set x = 'x' * 1000 %}" + "{% set x = x | list | join(x) %}" * 4,
    "indented": "{{ '\n\n' | indent(10**9) }}",
    "indented json": "{{ [1] | tojson(indent=10**9) }}",
    "json of lists": "{% set x = ['x' * 1000] * 1000 %}{{ ([x] * 1000) | tojson | length }}",
    "centred": "{{ 'x' | center(10**9) }}",
    "in batches": "{{ ([1] | batch(200000000, 'x') | list | first) | length }}",
    "rounded": "{{ 3 | round(10**9, 'ceil') }}",
    "lorem ipsum": "{{ lipsum(n=100000, max=100000) }}",
    "deep parentheses": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "deep blocks": "{% if true %}" * 20_000 + "x" + "{% endif %}" * 20_000,
    "lists in lists printed": NESTED + "{{ ns.x }}",
    "lists in lists by ~": NESTED + "{{ (ns.x ~ '') | length }}",
    "printed by pprint": NESTED + "{{ (ns.x | pprint) | length }}",
    "urlized": "{{ ('http://x ' * 9999999) | urlize | length }}",
    "wrapped": "{{ ('x' * 9999999) | wordwrap(1) | length }}",
}
ESCAPES = {
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "globals of a global": "{{ raise_exception.__globals__ }}{{ strftime_now.__globals__ }}",
    "attr": "{{ messages|attr('__class__')|attr('__init__') ~ messages.__class__() }}",
    "attr by map": "{{ ('x' | map('attr', '__class__') | list)[0].mro() }}",
    "attribute by map": "{{ (messages|map(attribute='__class__')|list)[0].mro() }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
    "format_map": "{{ '{x.__class__}'.format_map({'x': cycler}) }}",
    "append": "{{ messages.append(1) }}",
    "update": "{{ messages[0].update({'role': 'x'}) }}",
    "files": "{% include '/etc/passwd' %}{% import 'os' as os %}{{ os }}",
    "generator": "{% set g = messages|map('upper') %}{{ g.gi_frame.f_back.f_globals }}",
    "environment": "{{ self._TemplateReference__context.environment.from_string.__globals__ }}",
}
