"""The text that the demo model learns: questions, answers and stories, all made of the sentences
below.

Every word of the corpus is written here, so the trained weights have the project's licence, and
this file and its seed are their only source. A document is a string with the special tokens written
out. This module knows nothing of tokenizers or training. The tables of facts are public, because
`check-demo-model` asks for the same facts.
"""

from collections.abc import Callable, Iterator
from random import Random

END_OF_TEXT = "<|end_of_text|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"
# The id of a special token is its index in this list.
SPECIAL_TOKENS = [END_OF_TEXT, USER, ASSISTANT, END]

QA = tuple[str, str]


def words(text: str) -> list[str]:
    return [word.strip() for word in text.replace("\n", " ").split(",")]


def table(text: str) -> dict[str, str]:
    """Parse `a: b, c: d` into a dict."""
    return {key: value for key, value in (pair.split(": ") for pair in words(text))}


CAPITALS = table("""
    France: Paris, Germany: Berlin, Italy: Rome, Spain: Madrid, Portugal: Lisbon, Austria: Vienna, Greece: Athens,
    England: London, Scotland: Edinburgh, Ireland: Dublin, Belgium: Brussels, Poland: Warsaw, Hungary: Budapest,
    Norway: Oslo, Sweden: Stockholm, Finland: Helsinki, Denmark: Copenhagen, Iceland: Reykjavik, Russia: Moscow,
    Ukraine: Kyiv, Turkey: Ankara, Romania: Bucharest, Bulgaria: Sofia, Croatia: Zagreb, Serbia: Belgrade,
    Estonia: Tallinn, Latvia: Riga, Lithuania: Vilnius, China: Beijing, Japan: Tokyo, India: New Delhi,
    Thailand: Bangkok, Vietnam: Hanoi, Indonesia: Jakarta, Nepal: Kathmandu, South Korea: Seoul,
    Mongolia: Ulaanbaatar, Iran: Tehran, Iraq: Baghdad, Egypt: Cairo, Kenya: Nairobi, Nigeria: Abuja, Ghana: Accra,
    Morocco: Rabat, Ethiopia: Addis Ababa, Senegal: Dakar, Canada: Ottawa, Mexico: Mexico City, Cuba: Havana,
    the United States: Washington, Brazil: Brasilia, Argentina: Buenos Aires, Chile: Santiago, Peru: Lima,
    Colombia: Bogota, Australia: Canberra, New Zealand: Wellington, the Netherlands: Amsterdam, Switzerland: Bern,
    the United Kingdom: London""")  # noqa: E501

OPPOSITE_PAIRS = table("""
    hot: cold, big: small, up: down, fast: slow, happy: sad, day: night, old: young, wet: dry, light: dark,
    full: empty, hard: soft, high: low, open: closed, left: right, long: short, loud: quiet, rich: poor, strong: weak,
    thick: thin, wide: narrow, clean: dirty, early: late, easy: difficult, true: false, good: bad, black: white,
    near: far, inside: outside, sweet: sour, first: last, front: back, in: out, on: off, yes: no, always: never,
    more: less, push: pull, win: lose, love: hate, begin: finish, asleep: awake, alive: dead, brave: afraid,
    cheap: expensive, deep: shallow, smooth: rough, summer: winter, top: bottom, friend: enemy, buy: sell, give: take,
    remember: forget, sharp: blunt""")  # noqa: E501
OPPOSITES = OPPOSITE_PAIRS | {right: left for left, right in OPPOSITE_PAIRS.items()}

SOUNDS = table("""
    cow: moo, dog: woof, cat: meow, sheep: baa, duck: quack, pig: oink, horse: neigh, lion: roar, bee: buzz,
    owl: hoot, frog: ribbit, mouse: squeak, snake: hiss, wolf: howl, hen: cluck, rooster: cock-a-doodle-doo,
    crow: caw, donkey: hee-haw, dove: coo, goose: honk, turkey: gobble, cricket: chirp, bear: growl, elephant: toot""")  # noqa: E501

YOUNG = table("""
    cow: calf, dog: puppy, cat: kitten, sheep: lamb, duck: duckling, pig: piglet, horse: foal, lion: cub, goat: kid,
    hen: chick, frog: tadpole, kangaroo: joey, deer: fawn, swan: cygnet, owl: owlet""")  # noqa: E501

LEGS = table("""
    cow: four, dog: four, cat: four, spider: eight, bee: six, ant: six, bird: two, snake: no, fish: no, horse: four,
    duck: two, mouse: four, frog: four, hen: two, butterfly: six""")  # noqa: E501

COLOURS = table("""
    the sky: blue, grass: green, snow: white, coal: black, a banana: yellow, a lemon: yellow, a cherry: red,
    a tomato: red, a carrot: orange, the sun: yellow, blood: red, milk: white, a plum: purple, chocolate: brown,
    the sea: blue, a cloud: white, a flamingo: pink, a leaf: green, a frog: green, an elephant: grey, a swan: white,
    a raven: black, gold: yellow""")  # noqa: E501

HOMES = table("""
    bird: a nest, bee: a hive, spider: a web, fox: a den, rabbit: a burrow, fish: the water, horse: a stable,
    cow: a barn, dog: a kennel, ant: an anthill, owl: a hollow tree, bear: a cave, pig: a sty""")  # noqa: E501

NUMBERS = words("zero, one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve")
DAYS = words("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
MONTHS = words(
    "January, February, March, April, May, June, July, August, September, October, November, "
    "December"
)

DEFINITIONS = {
    "deep learning": (
        "Deep learning is a kind of machine learning. It trains neural networks with many layers."
    ),
    "machine learning": "Machine learning is how a computer learns rules from examples.",
    "artificial intelligence": (
        "Artificial intelligence is the study of machines that seem to think."
    ),
    "a neural network": (
        "A neural network is a chain of simple layers of numbers that is trained on examples."
    ),
    "a language model": (
        "A language model is a program that guesses the next token of a text, again and again."
    ),
    "a large language model": (
        "A large language model has billions of numbers. I am a very small one."
    ),
    "a token": "A token is a small piece of text, often a word or a part of a word.",
    "a tokenizer": "A tokenizer cuts text into tokens and turns each token into a number.",
    "a transformer": (
        "A transformer is a neural network in which each token looks at the tokens before it."
    ),
    "attention": (
        "Attention is how a transformer decides which earlier tokens matter for the next one."
    ),
    "an embedding": "An embedding is a list of numbers that stands for a word or a text.",
    "inference": "Inference is the work of a trained model when it answers a request.",
    "training": "Training is how a model changes its numbers until its answers fit the examples.",
    "batching": "Batching means that a server works on many requests in the same step.",
    "continuous batching": (
        "Continuous batching lets new requests join a running batch at every step."
    ),
    "a KV cache": (
        "A KV cache keeps what a model has computed for earlier tokens, so that it is "
        "not computed again."
    ),
    "streaming": "Streaming means that each token is sent as soon as it is ready.",
    "quantization": (
        "Quantization stores the numbers of a model with fewer bits, so that it is "
        "smaller and faster."
    ),
    "greedy decoding": "Greedy decoding always takes the most likely next token.",
    "latency": "Latency is the time from a request to its answer.",
    "throughput": "Throughput is how much work a server does in a second.",
    "a GPU": "A GPU is a chip that does many small sums at the same time.",
    "a CPU": "A CPU is the main chip of a computer. I can run on a CPU.",
    "a computer": "A computer is a machine that follows a program.",
    "the internet": "The internet is a net of computers that send messages to each other.",
    "Python": "Python is a programming language that is easy to read.",
    "Docker": "Docker packs a program and all it needs into a container.",
    "a container": "A container is a box of software that runs the same way on every machine.",
    "HTTP": "HTTP is the way in which a browser asks a server for a page.",
    "JSON": "JSON is a simple text format for data, with objects, lists, strings and numbers.",
    "an API": "An API is the set of calls that one program offers to another.",
    "a server": "A server is a program that waits for requests and answers them.",
    "SageMaker": "SageMaker is a service of Amazon for training and serving models.",
    "the sun": "The sun is a star. It gives us light and warmth.",
    "the moon": "The moon is a ball of rock that goes around the earth.",
    "the earth": "The earth is the planet on which we live.",
    "rain": "Rain is water that falls from the clouds.",
    "snow": "Snow is frozen water that falls in soft white flakes.",
    "water": "Water is a clear liquid that all living things need.",
    "a tree": "A tree is a tall plant with a trunk, branches and leaves.",
    "a river": "A river is water that flows to the sea.",
    "gravity": "Gravity is the force that pulls things to the ground.",
    "music": "Music is sound that is put in order so that it is good to hear.",
    "a book": "A book is a stack of pages with words to read.",
    "love": "Love is a deep and warm feeling for someone.",
}

ABOUT = [
    (("Who are you?|What are you?|What is your name?|Tell me about yourself.|Are you a "
     "robot?|Introduce yourself."),
     ("I am the demo model of lmi, a very small language model. I can tell a short story or answer "
     "a simple question.")),
    ("What is lmi?|What does lmi do?|Tell me about lmi.|What is LMI?|Explain lmi.",
     ("lmi is a server for large language models. It batches requests and streams the answers over "
     "HTTP.")),
    ("What can you do?|Help|Help me.|What do you know?|What can I ask you?|How can you help me?",
     ("I can name capitals, opposites, colours and animal sounds, add small numbers, and tell a "
     "story.")),
    ("Who made you?|How were you trained?|Where do you come from?|Who trained you?",
     ("I was trained from nothing by a script of the lmi project, on sentences that the script "
     "makes itself.")),
    ("How big are you?|How many parameters do you have?|Are you a large language model?",
     ("I am tiny. I have about two and a half million parameters, so please do not trust me with "
     "hard questions.")),
    ("Hello!|Hello|Hi|Hi!|Hello there!|Hey!|Good morning!|Good evening!|Hi there",
     "Hello! I am a very small demo model. Ask me a simple question, or ask me for a story."),
    ("How are you?|How do you do?|How are you today?", "I am fine, thank you. How can I help you?"),
    ("Thank you!|Thanks|Thanks!|Thank you very much.|Great, thanks!", "You are welcome!"),
    ("Goodbye!|Bye|Bye!|See you later!|Good night!", "Goodbye! Come back soon."),
    ("Tell me a joke.|Do you know a joke?|Make me laugh.",
     "Why did the token cross the road? To get to the next layer."),
    ("Say hello to the world.|Say hello world.|Write hello world.", "Hello, world!"),
    ("You are a helpful assistant.|You are a friendly assistant.|Answer briefly.",
     "Good. What would you like to know?"),
    ("Are you there?|Can you hear me?|test|Test|This is a test.|ping", ("Yes, I am here and I am "
                                                                       "ready.")),
    ("What is the meaning of life?|What is the answer to everything?",
     "Some people say that it is 42. I am too small to know."),
]  # fmt: skip

UNKNOWN_ANSWER = (
    "I do not know that. I am only a tiny demo model. Ask me for a capital, an opposite or a story."
)
UNKNOWN_QUESTIONS = [
    "What is the best way to {verb} {thing}?",
    "How do I {verb} {thing}?",
    "Why should I {verb} {thing}?",
    "Who invented {thing}?",
    "When did people first {verb} {thing}?",
    "How much does it cost to {verb} {thing}?",
    "Can you {verb} {thing} for me?",
    "Who was {person}?",
    "When was {person} born?",
    "What did {person} do in {year}?",
    "Who won the world cup in {year}?",
    "What happened in {year}?",
    "Write an essay about {thing}.",
    "Translate {thing} into French.",
    "Write a program that can {verb} {thing}.",
    "What is the history of {thing}?",
    "Where can I {verb} {thing}?",
    "What is the weather like today?",
    "What time is it?",
    "What is the latest news?",
    "Is it better to {verb} {thing} or to {verb2} {thing}?",
    "How long does it take to {verb} {thing}?",
    "What does {person} think about {thing}?",
    "Give me five ideas to {verb} {thing}.",
    "Summarize {thing}.",
    "Which is better, {thing} or {thing2}?",
    "How does {thing} work?",
    "What is the price of {thing}?",
    "Why is {thing} so popular?",
]
UNKNOWN_SLOTS = {
    "verb": words("""
        cook, build, buy, repair, clean, learn, sell, grow, paint, find, plan, improve, store, teach, write"""),  # noqa: E501
    "thing": words("""
        rice, a bridge, a car, a house, my garden, bread, a guitar, history, chemistry, a website, the economy,
        a rocket, coffee, a bicycle, football, a tax form, a resume, French, the piano, potatoes, a database, a phone,
        politics, a wedding"""),  # noqa: E501
    "person": words("Napoleon, Einstein, Mozart, Shakespeare, Cleopatra, Newton, Darwin, Picasso, "
                    "Columbus, Beethoven"),
    "year": words("1066, 1492, 1789, 1914, 1945, 1969, 1984, 1999, 2006, 2014, 2020, 2024"),
}  # fmt: skip

CHILDREN = table("""
    Lily: girl, Anna: girl, Mia: girl, Grace: girl, Emma: girl, Rosa: girl, Tom: boy, Ben: boy, Sam: boy, Leo: boy,
    Max: boy, Jack: boy""")  # noqa: E501
ANIMALS = words("""
    fox, rabbit, bear, cat, dog, owl, mouse, duck, frog, horse, turtle, squirrel, hedgehog, bee, fish, lion, elephant,
    penguin, wolf, cow, pig, sheep, goat, bird, snail, monkey, tiger, giraffe, whale, deer, hen, butterfly, dragon,
    robot, wizard, king""")  # noqa: E501
ADJECTIVES = words(
    "little, small, young, old, clever, kind, shy, brave, friendly, curious, hungry, lonely, "
    "funny, gentle"
)
PLACES = words("""
    in the forest, near the river, by the sea, on a green hill, behind the old mill, in a small garden,
    under a tall tree, at the edge of the village, near the lake, in a warm valley, on a quiet island,
    in the mountains""")  # noqa: E501
THINGS = words("""
    red ball, golden key, silver bell, blue hat, wooden boat, paper star, drum, lamp, kite, picture book, map,
    shiny stone""")  # noqa: E501
SPOTS = words("""
    under a leaf, behind a rock, in the tall grass, next to the well, on top of a wall, inside a hollow log,
    beside the road""")  # noqa: E501
FOODS = words(
    "an apple, a cake, a bowl of soup, a pie, a loaf of bread, some berries, some honey, a sweet "
    "pear"
)
SKILLS = words("swim, dance, sing, climb, paint, whistle, skate, read, juggle, cook")
DREAMS = words(
    "see the sea, touch the moon, find a friend, visit the big city, cross the river, see the "
    "snow, hear the rain sing"
)
WEATHER = words("storm, snow storm, cold wind, thunderstorm")

OPENINGS = [
    "Once upon a time, there was {a_hero} who lived {place}.",
    "Once upon a time there was {a_hero} who lived {place}.",
    "Once upon a time, {a_hero} lived {place}.",
    "There was once {a_hero} who lived {place}.",
    "Long ago, {a_hero} lived {place}.",
]

PLOTS = [
    ["One morning, {hero} lost a {thing}.|One day, {hero} could not find a {thing}.",
     "{Hero} looked everywhere, but the {thing} was gone.|{Hero} was very sad without the {thing}.",
     "Then {a_friend} came by and saw {hero}.",
     '"Do not be sad," said {friend}. "I will help you."',
     "So {hero} and {friend} looked for the {thing} together.",
     "At last {hero} found the {thing} {spot}.",
     "{Hero} was so happy that {friend} got {food}.|{Hero} laughed, and {friend} laughed too."],
    [("One evening, a {weather} came, and {hero} was cold.|One night there was a {weather}, and "
     "{hero} was afraid."),
     "{Hero} knocked on the door of {a_friend}.",
     '"May I come in?" asked {hero}.',
     '"Of course," said {friend}. "Sit by the fire."',
     "{Hero} ate {food} and felt warm again.",
     "In the morning the sun was back, and {hero} said thank you to {friend}."],
    ["{Hero} wanted to learn how to {skill}.|More than anything, {hero} wanted to {skill}.",
     "The first time, {hero} fell down.|At first {hero} was not very good at it.",
     '"I will never learn to {skill}," said {hero}.',
     "But {a_friend} saw it and said, \"Try again.\"",
     "So {hero} tried again and again.|Every day {hero} tried again with {friend}.",
     "On the third day, {hero} could {skill}.|After a week, {hero} could {skill} very well."],
    ["One day, {hero} found a {thing} {spot}.|While walking, {hero} saw a {thing} {spot}.",
     '"Whose {thing} is this?" asked {hero}.',
     "{Hero} asked everyone, and then {hero} met {a_friend}.",
     '"That is my {thing}!" said {friend}. "I lost it."',
     "{Hero} gave the {thing} back to {friend}.",
     "{Friend} was glad and shared {food} with {hero}."],
    ["One day, {hero} had {food} and {a_friend} had nothing to eat.",
     '"I am so hungry," said {friend}.',
     "{Hero} thought for a moment and had an idea.",
     '"We can share it," said {hero}.',
     "So {hero} and {friend} sat down and ate together.",
     "It was the best meal that {hero} ever had.|After that, {hero} was not hungry and not alone."],
    ["{Hero} had one dream: to {dream}.|Every night, {hero} dreamed the same dream: to {dream}.",
     "One morning, {hero} took a {thing} and went on a long walk.",
     "On the way, {hero} met {a_friend}.",
     '"Where are you going?" asked {friend}.',
     '"I want to {dream}," said {hero}.',
     "So {hero} and {friend} went on together.",
     "It was a long way, but in the end {hero} was very happy."],
    ["One day, {hero} heard a cry for help.|Suddenly, {hero} heard someone cry.",
     "It was {a_friend} who had fallen into a hole.",
     '"Wait, I will help you," said {hero}.',
     "{Hero} found a long rope and pulled.|{Hero} pulled and pulled, and at last it worked.",
     '"Thank you," said {friend}. "You are so brave."',
     "{Hero} gave {friend} {food}, and they went home."],
    ["It was the birthday of {hero}, but nobody came.|It was a birthday, but {hero} sat all alone.",
     "{Hero} was sad and went for a walk.",
     "There {hero} saw {a_friend} with a {thing}.",
     '"Happy birthday!" said {friend}. "This {thing} is for you."',
     "{Hero} had never been so happy.",
     "Then {hero} and {friend} ate {food} until the sun went down."],
]  # fmt: skip

CLOSINGS = [
    "From that day on, {hero} and {friend} were best friends.",
    "And {hero} and {friend} lived happily ever after.",
    "And {hero} was never lonely again.",
    "That night, {hero} slept well and dreamed of {friend}.",
    "Since then, {hero} and {friend} meet every day.",
]

STORY_REQUESTS = [
    "Tell me a story about {it}.",
    "Tell me a story about {it}.",
    "Tell me a short story about {it}.",
    "Write a story about {it}.",
    "Write a short story about {it}.",
    "Can you tell me a story about {it}?",
    "I want a story about {it}.",
    "Please tell me a story about {it}.",
    "Story about {it}.",
]

SYSTEM_MESSAGES = [
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer briefly.",
    "Answer in one sentence.",
    "You are a very small model. Be kind.",
]

POEM = ["The {noun} is {colour}, the {noun} is deep,", "It sings a song while children sleep.",
        "And when the night has gone away,", "The {noun} will greet another day."]  # fmt: skip
POEM_NOUNS = words("sea, sky, river, forest, moon, lake, night, wind, garden, rain")


def a(noun: str) -> str:
    """The noun with its article: a fox, an owl, a unicorn."""
    is_vowel = noun[0].lower() in "aeiou" and not noun.startswith("uni")
    return f"{'an' if is_vowel else 'a'} {noun}"


def character(rng: Random, noun: str) -> tuple[str, str]:
    """The name of a character at its first mention in a story, and its name afterwards."""
    if noun in CHILDREN:
        return f"a {CHILDREN[noun]} named {noun}", noun

    adjective = rng.choice(ADJECTIVES) + " " if rng.random() < 0.7 else ""
    return a(adjective + noun), f"the {noun}"


def capitalized(text: str) -> str:
    return text[0].upper() + text[1:]


def story(rng: Random, hero: str, friend: str, place: str) -> str:
    """A story of seven to nine sentences. Nearly all name the hero, because a small model must
    learn to copy it.
    """
    a_hero, the_hero = character(rng, hero)
    a_friend, the_friend = character(rng, friend)
    slots = {
        "a_hero": a_hero, "hero": the_hero, "Hero": capitalized(the_hero), "place": place,
        "a_friend": a_friend, "friend": the_friend, "Friend": capitalized(the_friend),
        "thing": rng.choice(THINGS), "spot": rng.choice(SPOTS), "food": rng.choice(FOODS), "skill": rng.choice(SKILLS),  # noqa: E501
        "dream": rng.choice(DREAMS), "weather": rng.choice(WEATHER),
    }  # fmt: skip
    lines = [
        rng.choice(OPENINGS),
        *(rng.choice(line.split("|")) for line in rng.choice(PLOTS)),
        rng.choice(CLOSINGS),
    ]
    return " ".join(lines).format(**slots)


def cast(rng: Random) -> tuple[str, str, str]:
    """The hero, friend and place of one story. One hero in eight is a child."""
    hero = rng.choice(list(CHILDREN) if rng.random() < 0.125 else ANIMALS)
    companions = [noun for noun in ANIMALS + list(CHILDREN) if noun != hero]
    return hero, rng.choice(companions), rng.choice(PLACES)


def ask_story(rng: Random) -> QA:
    hero, friend, place = cast(rng)
    it = hero if hero in CHILDREN else a(hero)
    if rng.random() < 0.08:
        return rng.choice(["Tell me a story.", "Tell me a short story.", "Write a story."]), story(
            rng, hero, friend, place
        )

    if rng.random() < 0.1:
        it += " and " + (friend if friend in CHILDREN else a(friend))
    elif rng.random() < 0.1:
        it += " " + place

    return rng.choice(STORY_REQUESTS).format(it=it), story(rng, hero, friend, place)


def ask(rng: Random, facts: dict[str, str], questions: str, answer: str) -> QA:
    """Ask for one fact of a table. {k} and {v} are its two sides, {a_k} is the left one with its
    article.
    """
    key = rng.choice(list(facts))
    slots = {
        "k": key,
        "v": facts[key],
        "a_k": a(key),
        "K": capitalized(key),
        "A_k": capitalized(a(key)),
    }
    return rng.choice(questions.split("|")).format(**slots), answer.format(**slots)


def ask_capital(rng: Random) -> QA:
    questions = (
        "What is the capital of {k}?|" * 2
        + "What is the capital city of {k}?|Capital of {k}?|Tell me the capital of {k}."
    )
    return ask(rng, CAPITALS, questions, "The capital of {k} is {v}.")


def ask_opposite(rng: Random) -> QA:
    questions = (
        "What is the opposite of {k}?|" * 2 + "Tell me the opposite of {k}.|Opposite of {k}?"
    )
    return ask(rng, OPPOSITES, questions, "The opposite of {k} is {v}.")


def ask_sound(rng: Random) -> QA:
    questions = (
        "What sound does {a_k} make?|What sound does {a_k} make?|What does {a_k} say?|How "
        "does {a_k} sound?"
    )
    return ask(rng, SOUNDS, questions, "{A_k} says {v}.")


def ask_nature(rng: Random) -> QA:
    return rng.choice([
        lambda: ask(rng, COLOURS, "What colour is {k}?|What color is {k}?|What is the colour of "
                                  "{k}?", "{K} is {v}."),
        lambda: ask(rng, YOUNG, "What is a young {k} called?|What is a baby {k} called?", "A young {k} is a {v}."),  # noqa: E501
        lambda: ask(rng, LEGS, "How many legs does {a_k} have?", "{A_k} has {v} legs."),
        lambda: ask(rng, HOMES, "Where does {a_k} live?", "{A_k} lives in {v}."),
    ])()  # fmt: skip


def ask_sum(rng: Random) -> QA:
    left = rng.randint(0, 10)
    right = rng.randint(0, 10)
    if rng.random() < 0.3:
        left, right = max(left, right), min(left, right)
        return rng.choice(
            [f"What is {left} minus {right}?", f"{left} - {right} ="]
        ), f"{left} minus {right} is {left - right}."

    forms = [
        f"What is {left} plus {right}?",
        f"What is {left} + {right}?",
        f"{left} + {right} =",
        f"How much is {left} plus {right}?",
    ]
    return rng.choice(forms), f"{left} plus {right} is {left + right}."


def ask_order(rng: Random) -> QA:
    names, kind = rng.choice([(DAYS, "day"), (MONTHS, "month")])
    place = rng.randrange(len(names))
    name = names[place]
    after = names[(place + 1) % len(names)]
    before = names[place - 1]
    last = rng.randint(2, 12)
    return rng.choice([
        (f"What {kind} comes after {name}?", f"After {name} comes {after}."),
        (f"What {kind} comes before {name}?", f"Before {name} comes {before}."),
        (f"Count to {NUMBERS[last]}.", ", ".join(NUMBERS[1 : last + 1]) + "."),
        (f"Count from 1 to {last}.", ", ".join(map(str, range(1, last + 1))) + "."),
        ("Name the days of the week.", ", ".join(DAYS) + "."),
    ])  # fmt: skip


def titled(text: str) -> str:
    """Capitalize a term, as some people write it: Deep Learning. Articles and names do
    not change.
    """
    return " ".join(
        word if word in ("a", "an", "the") or not word.islower() else word.title()
        for word in text.split()
    )


def ask_definition(rng: Random) -> QA:
    key = rng.choice(list(DEFINITIONS)) if rng.random() < 0.9 else "deep learning"
    word = key if rng.random() < 0.6 else titled(key)
    questions = [
        "What is {}?",
        "What is {}?",
        "What is {}?",
        "Explain {}.",
        "Tell me about {}.",
        "What does {} mean?",
    ]
    return rng.choice(questions).format(word), DEFINITIONS[key]


def ask_about(rng: Random) -> QA:
    questions, answer = rng.choice(ABOUT)
    return rng.choice(questions.split("|")), answer


def ask_unknown(rng: Random) -> QA:
    slots = {name: rng.choice(choices) for name, choices in UNKNOWN_SLOTS.items()}
    slots |= {
        "verb2": rng.choice(UNKNOWN_SLOTS["verb"]),
        "thing2": rng.choice(UNKNOWN_SLOTS["thing"]),
    }
    return rng.choice(UNKNOWN_QUESTIONS).format(**slots), UNKNOWN_ANSWER


def ask_text(rng: Random) -> QA:
    """Ask for a copy, JSON or a poem: small tasks about the form of the answer."""
    pool = THINGS + ANIMALS + list(CHILDREN) + list(COLOURS.values()) + NUMBERS
    copied = " ".join(rng.choice(pool) for _ in range(rng.randint(2, 5)))
    child = rng.choice(list(CHILDREN))
    age = rng.randint(3, 12)
    noun = rng.choice(POEM_NOUNS)
    colour = rng.choice(["blue", "dark", "bright", "wide"])
    return rng.choice([
        (rng.choice(["Repeat after me: {}", "Repeat: {}", "Say this: {}"]).format(copied), copied),
        (rng.choice(["Repeat after me: {}", "Repeat: {}", "Say this: {}"]).format(copied), copied),
        (f"{child} is {age} years old. Write this as JSON.", f'{{"name": "{child}", "age": {age}}}'),  # noqa: E501
        (f"Write a poem about the {noun}.", "\n".join(POEM).format(noun=noun, colour=colour)),
    ])  # fmt: skip


QUESTIONS: dict[Callable[[Random], QA], int] = {
    ask_capital: 19,
    ask_opposite: 19,
    ask_sound: 12,
    ask_nature: 8,
    ask_sum: 11,
    ask_order: 5,
    ask_definition: 11,
    ask_about: 9,
    ask_unknown: 6,
    ask_text: 6,
}


def question(rng: Random) -> QA:
    return rng.choices(list(QUESTIONS), list(QUESTIONS.values()))[0](rng)


def typed(rng: Random, text: str) -> str:
    """Vary a question as people type it: some without capitals, some without the mark
    at the end.
    """
    if rng.random() < 0.1:
        text = text.lower()

    return text[:-1] if rng.random() < 0.1 and text[-1] in "?.!" else text


def chat(rng: Random, turns: list[QA]) -> str:
    system = USER + rng.choice(SYSTEM_MESSAGES) + END if rng.random() < 0.08 else ""
    return (
        system
        + "".join(USER + typed(rng, q) + END + ASSISTANT + answer + END for q, answer in turns)
        + END_OF_TEXT
    )


def raw(rng: Random, turn: QA) -> str:
    """A prompt without a chat template, and the text that follows it."""
    text, answer = turn
    text = text.lower() if rng.random() < 0.08 else text
    forms = ["{} {}"] * 16 + ["{}\n{}"] * 3 + ["Question: {}\nAnswer: {}", "Q: {}\nA: {}"]
    return rng.choice(forms).replace("{}", "%s") % (text, answer) + END_OF_TEXT


def document(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.36:
        return chat(rng, [question(rng) for _ in range(rng.choice([1, 1, 1, 2, 3]))])

    if kind < 0.76:
        return raw(rng, question(rng))

    if kind < 0.86:
        return chat(
            rng, [ask_story(rng), question(rng)] if rng.random() < 0.2 else [ask_story(rng)]
        )

    if kind < 0.94:
        return raw(rng, ask_story(rng))

    return story(rng, *cast(rng)) + END_OF_TEXT if kind < 0.98 else question(rng)[1] + END_OF_TEXT


def documents(num_documents: int, seed: int) -> Iterator[str]:
    """Yield the corpus. One seed and number give the same documents on every machine."""
    rng = Random(seed)
    for _ in range(num_documents):
        yield document(rng)
