"""Write the demo data set: people who ask a question, and what their past posts show they care about.

Why: GRASP trains a small chat model to cover what a user cares about, learnt from the user's past posts. The real data
(LaMP-QA) is too long for a demo on a CPU, so this script makes rows of the same schema with very short posts, all
written for this demo. A user has 3 to 5 concerns; each is one everyday word ("budget", "pets") that a tiny model can
weave into advice on nearly any topic. Each concern shows plainly in one post, one more post is chat, and the rubric of
the user's question is exactly those concerns. The question never mentions them: only the posts tell which to cover.

What: train.jsonl (204 rows), validation.jsonl (48) and test.jsonl (48). Splits share no user and no question topic, and
about a third of the posts in validation and test come from sentences that train never uses.

How: python demo/make_data.py [--out demo/data]     (standard library only; every run gives the same bytes)
In the word lists, after the code, " | " and line ends separate, and "[a|b]" means "either a or b".
"""

import argparse
import itertools
import json
import random
import re
from collections import namedtuple
from pathlib import Path

SEED = 20240
ROWS = {"train": 204, "validation": 48, "test": 48}
TOPICS_PER_CONFIG = {"train": 8, "validation": 3, "test": 3}
CONCERNS_PER_USER = (4, 3, 5, 4)  # users take these in turn, so every split has 4 on average
ASKS_TWICE = 4  # every fourth user
HELD_OUT_SENTENCES = 3  # of each concern, the last ones listed
HELD_OUT_CHAT = 6
HELD_OUT_SHARE = (True, False, False)  # of the posts in validation and test, dealt like cards
CLASH = {"noise", "music"}  # nobody has both

Concern = namedtuple("Concern", "title why clauses posts")  # said as at CONCERNS below
Topic = namedtuple("Topic", "config thing category unfit questions")  # said as at TOPICS below


def items_of(text):
    return re.split(r" \| |\n", text.strip())


def wordings(*texts):
    """Every way to read the texts with "[a|b]" choices in them."""
    read = []
    for text in texts:
        parts = re.split(r"\[([^]]*)\]", text)
        options = [part.split("|") if i % 2 else [part] for i, part in enumerate(parts)]
        read += ["".join(choice) for choice in itertools.product(*options)]
    return read


def capitalised(text):
    return text[0].upper() + text[1:]


def read_concerns():
    concerns = []
    for block in ("\n" + CONCERNS.strip()).split("\n= ")[1:]:
        header, posts = block.split("\n", 1)
        title, why, *clauses = items_of(header)
        concerns.append(Concern(title, why, clauses, items_of(posts)))
    return concerns


def read_topics():
    """The topics of each split: in every config the first go to train, the last to test."""
    topics = {split: [] for split in ROWS}
    splits = [split for split, number in TOPICS_PER_CONFIG.items() for _ in range(number)]
    for config, text in TOPICS.items():
        for split, line in zip(splits, text.strip().split("\n"), strict=True):
            thing, category, unfit, *questions = items_of(line)
            topics[split].append(Topic(config, thing, category, unfit.split(), questions))
    return topics


def dealt(items, rng):
    """Deal the items in random order like cards, and shuffle anew when all are dealt."""
    deck = list(items)
    while True:
        rng.shuffle(deck)
        yield from deck


def dealt_wordings(sentences, rng):
    """Deal wordings of the sentences: each round uses every sentence once, in another wording each time."""
    for wording_deck in dealt([dealt(wordings(sentence), rng) for sentence in sentences], rng):
        yield next(wording_deck)


def pick_concerns(concerns, unfit, number, times_used, rng):
    """Pick and count concerns: any fitting one may come up, those rarely used so far more often."""
    picked = []
    for concern in sorted(concerns, key=lambda concern: rng.random() * (1 + times_used[concern.title]) ** 2):
        if len(picked) < number and concern.title not in unfit and not CLASH <= {concern.title, *(c.title for c in picked)}:
            picked.append(concern)
            times_used[concern.title] += 1
    return picked


def write_posts(user, picked, split, decks, rng):
    """One post for each concern and one chat post, shuffled."""
    posts = []
    for number, title in enumerate(rng.sample([None, *(c.title for c in picked)], len(picked) + 1), 1):
        common, fresh = decks[title]
        deck = fresh if split != "train" and next(decks["held out"]) else common
        posts.append({"id": f"{user}-p{number}", "text": next(deck)})
    return posts


def write_row(row_id, topic, picked, posts, questions, frames, rng):
    aspects = []
    for concern in rng.sample(picked, len(picked)):  # so that neither posts nor rubric give the order of the other
        words = {"thing": topic.thing, "title": concern.title, "why": concern.why, "Why": capitalised(concern.why)}
        reason, evidence = next(frames["reason"]).format(**words), rng.choice(wordings(*concern.clauses))
        aspects.append({"aspect": concern.title, "reason": reason, "evidence": evidence})
    clauses, half = [aspect["evidence"] for aspect in aspects], len(aspects) // 2
    first = capitalised(next(frames["first lead"]) + ", and ".join(clauses[:half]))
    second = capitalised(next(frames["second lead"]) + ", and ".join(clauses[half:]))
    return {
        "id": row_id,
        "config": topic.config,
        "question": next(questions[topic.thing]),
        "category": topic.category,
        "narrative": f"{next(frames['opener']).format(thing=topic.thing)}. {first}. {second}.",
        "rubric_aspects": aspects,
        "profile": posts,
    }


def make_split(split, topics, concerns, decks, frames, rng):
    topic_decks = [dealt([t for t in topics if t.config == config], rng) for config in TOPICS]
    questions = {topic.thing: dealt(wordings(*topic.questions), rng) for topic in topics}
    times_used = dict.fromkeys((concern.title for concern in concerns), 0)
    rows = []
    for user_number in itertools.count(1):
        if len(rows) == ROWS[split]:
            return rows
        user = f"{split}-u{user_number:03d}"
        asks = min(1 if user_number % ASKS_TWICE else 2, ROWS[split] - len(rows))
        # Row by row the configs take turns, so each has a third of the rows.
        asked = [next(topic_decks[(len(rows) + i) % len(TOPICS)]) for i in range(asks)]
        unfit = [title for topic in asked for title in topic.unfit]
        number_wanted = CONCERNS_PER_USER[user_number % len(CONCERNS_PER_USER)]
        picked = pick_concerns(concerns, unfit, number_wanted, times_used, rng)
        posts = write_posts(user, picked, split, decks, rng)
        for number, topic in enumerate(asked, 1):
            rows.append(write_row(f"{user}-q{number}", topic, picked, posts, questions, frames, rng))


def make_data():
    """All rows of all splits."""
    rng = random.Random(SEED)
    concerns, topics, decks = read_concerns(), read_topics(), {"held out": dealt(HELD_OUT_SHARE, rng)}
    sources = [(concern.title, concern.posts, HELD_OUT_SENTENCES) for concern in concerns]
    for title, sentences, held_out in [*sources, (None, items_of(CHAT), HELD_OUT_CHAT)]:
        # One deck for all splits, and one that train never touches.
        decks[title] = dealt_wordings(sentences[:-held_out], rng), dealt_wordings(sentences[-held_out:], rng)
    frames = {name: dealt(wordings(*texts), rng) for name, texts in FRAMES.items()}
    return {split: make_split(split, topics[split], concerns, decks, frames, rng) for split in ROWS}


def main():
    parser = argparse.ArgumentParser(description="Write the demo data set.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for split, rows in make_data().items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (out / f"{split}.jsonl").write_bytes("".join(lines).encode("utf-8"))
        print(f"{out / split}.jsonl: {len(rows)} rows")


FRAMES = {
    "opener": [
        "I have been thinking about this {thing} since [spring|last winter|my birthday]",
        "This {thing} has been on my mind for [weeks|months|quite a while]",
        "I have made no plans for the {thing} yet, simply because I [do not know|cannot decide] where to start",
        "I would love the {thing} to turn out [well|nicely], and some [kind|down-to-earth] advice would help",
    ],
    "first lead": ["", "", "Please keep in mind that ", "It helps to know that ", "I should add that "],
    "second lead": ["", "On top of that, ", "Also, ", "Besides, ", "What is more, "],
    "reason": [
        "{Why}, so advice on the {thing} should mention {title}.",
        "Advice on the {thing} should keep {title} in mind, because {why}.",
        "{Why}, and that is why advice on the {thing} should deal with {title}.",
    ],
}

# One topic a line: thing | category | titles that any answer on it would mention, or - | questions.
TOPICS = {
    "Art_and_Entertainment": """
guitar practice | guitar | music | How do I start to learn the guitar? | How should I practise the guitar [alone|at home]?
film night | film | - | How do I set up a [cosy|fun] film night at home? | Which films suit a winter film night?
board game evening | board games | - | How do I host a board game evening? | Which board game should I [buy|try] first?
painting hobby | painting | - | How do I get started with painting? | What should I paint first [as a beginner|this spring]?
singing group | singing | music | How do I start a [small|cheerful] singing group? | What makes a singing group last?
museum day | museums | history | How do I plan a good day at a museum? | Which museum should I visit [first|on a Sunday]?
dance evening | dance | music exercise | How do I organise a [salsa|folk] dance evening? | What makes a dance evening fun?
short story | creative writing | - | How do I write my first short story? | What could I write a short story about?
knitting project | textile crafts | - | What should I knit [first|this winter]? | How do I begin a knitting project?
quiz night | quizzes | - | How do I run a [lively|short] quiz night? | Which questions should I ask at a quiz night?
book club | reading | - | How do I start a book club [in my town|this autumn]? | Which books suit a new book club?
puppet show | stage crafts | - | How do I put on a [short|funny] puppet show? | What could a puppet show be about?
theatre evening | theatre | - | How do I plan an evening at the theatre? | Which play should I see [this month|this winter]?
drawing course | drawing | - | How do I choose a drawing course? | What should I draw first [at home|this week]?
""",
    "Lifestyle_and_Personal_Development": """
running plan | running | exercise health | How do I start running [this spring|as an adult]? | What makes a good running plan?
morning routine | habits | sleep exercise | How do I build a good morning routine? | What should I do first in the morning?
herb garden | gardening | - | How do I start a small herb garden? | Which herbs should I grow [first|this spring]?
bedroom makeover | bedrooms | sleep space comfort | How can I give my bedroom a [fresh|new] look? | What should my bedroom have?
camping weekend | camping | nature weather | What should I pack for a camping weekend? | How do I plan a camping weekend?
dinner party | hosting | - | What should I cook for a dinner party [of six|on Saturday]? | How do I host a relaxed dinner party?
baking day | baking | - | What should I bake on a [free|slow] Saturday? | How do I plan a baking day at home?
birthday present | presents | - | How do I find a birthday present for my [sister|father]? | What makes a good birthday present?
diary habit | journaling | - | How do I keep a diary [every day|going]? | What could I write in a diary?
swimming plan | water sports | exercise health | How do I get better at swimming this year? | How often should I swim?
picnic | picnics | - | How do I organise a picnic [in the park|by the river]? | What should I bring to a picnic?
new hobby | hobbies | - | How do I choose a new hobby? | Which hobby should I try [first|this year]?
living room | interiors | space comfort | How should I set up my living room? | What should I buy for my new living room?
city trip | city trips | travel | How do I plan a weekend in a big city? | What should I do on my first day in a new city?
""",
    "Society_and_Culture": """
street party | local life | - | How do we organise a street party [in June|this summer]? | What makes a street party a success?
wedding | ceremonies | - | How do I plan a [small|village] wedding? | What should I think about first for a wedding?
clothes swap | sharing | - | How do I run a clothes swap? | What makes a clothes swap fun?
flea market stall | markets | - | How do I set up a stall at a flea market? | What should I sell at a flea market?
community garden | shared gardens | - | How do we start a community garden? | What should we grow first in a community garden?
family reunion | family life | - | How do I plan a [big|summer] family reunion? | What should we do at a family reunion?
volunteer day | volunteering | - | How do I plan a volunteer day in our town? | What could we do on a volunteer day?
language class | languages | - | How do I choose a [French|Spanish] class? | How can I get more out of a language class?
harvest festival | feasts | - | How do we hold a [small|village] harvest festival? | What should be part of a harvest festival?
tea afternoon | tea culture | - | How do I host a tea afternoon? | What should I serve at a tea afternoon [at home|on Sunday]?
shared breakfast | shared meals | - | How do we organise a breakfast for our [street|office]? | What should a breakfast offer?
town festival | festivals | - | How do I plan a [small|summer] town festival? | What should our town festival offer?
farewell party | parties | - | How do I plan a farewell party for a colleague? | What makes a farewell party [nice|special]?
world food evening | world food | - | How do I host a world food evening? | Which dishes suit a world food evening?
""",
}

# Each concern: = title | why | clauses in the asker's own words, for the narrative; then its posts, of which the last three
# are kept out of train. No post, question or chat line uses the title of another concern.
CONCERNS = """
= budget | the asker must count every coin | money is short [this year|right now] | I cannot pay for anything fancy
My budget is small, so I mended the old [bike|coat|lamp|chair]. | I write every coin into my budget [book|list|diary|file].
The [sofa|hotel|jacket|ring] was far too expensive for my budget. | I cook [beans|soup|rice|lentils] to stay within my budget.
I always check my budget before I buy [shoes|paint|fruit|tea]. | My budget is very tight after [the rent|Christmas|the repairs].
My budget decides which [cheese|soap|socks] I buy. | Free [concerts|walks] are best, as my budget is nearly empty.
A tight budget means I borrow [tools|novels|films], not buy them.
= time | the asker has hardly a free hour | I can only spare half an hour a day | work fills nearly all my days
I have little time, because I work [two jobs|long shifts|late]. | Time is short, so I eat lunch [standing up|at my desk|in bed].
I [hurry|run], as free time is rare [for me|here|these days]. | I never have time for long [recipes|films|calls|meetings].
My [job|course|shop|commute] takes [nearly all|most of] my time. | I try to save time when [cooking|shopping|ironing|eating].
Time matters to me, so I plan every [hour|morning].
I left the [choir|chess team] because I had no time. | Between work and classes, I have no time for [myself|fun|a break].
= children | a toddler and a six-year-old live with the asker | my little ones always come along | small hands grab everything
My children come first, so I leave work at [three|four|noon]. | I do the [shopping|cooking|washing|garden] with my children.
My two children want to join in [everything|all my plans]. | I [built|painted|bought] a little [bench|bed] for my children.
On [Sundays|Fridays|holidays] my children choose [lunch|what we do]. | I hardly go [anywhere|out|away] without my children.
My two children need me [all day|all evening|at meals].
If my children cannot join, I [stay home|say no]. | I plan every [day|evening|morning|meal] for my two children.
= noise | loud sounds bother the asker a lot | loud places give me a headache | I like it calm and quiet | my ears ring quickly
I cannot stand noise, so I [shop|swim|eat] very [early|late]. | I moved because of the noise from the [road|pub|port|club].
Noise hurts me, so I wear ear plugs [on trains|at work|in town]. | I left the [cafe|pub|fair|zoo] early because of the noise.
The noise of the [drill|mower|pump|road] upsets me every day. | I avoid all noise, even from a loud [fridge|clock|fan|kettle].
I sold my [blender|drill|scooter], as I hate its noise. | Any noise [at night|after nine] ruins my whole evening.
Too much noise makes me [tired|cross|nervous], so I like quiet [corners|streets|places].
= environment | the asker wants to protect the planet | I try to leave no rubbish behind | the planet should not suffer for it
I gave up [my car|beef|flying|my dryer] for the environment. | I avoid plastic [bags|cups|straws|toys] for the environment.
The environment matters to me, so I reuse [jars|tins|wool]. | For the environment, I wash my [shirts|hair] in [cold|cool] water.
I buy local [apples|bread|milk|honey] to help the environment. | I pick up litter [in parks|daily|at lakes] for the environment.
Harm to the environment worries me [daily|a great deal].
I take the [train|bus] to help the environment. | I check whether a [soap|toy|jacket] harms the environment before buying it.
= space | the asker's flat is tiny | I live in one small room | there is nowhere to put big things | it must fit into a cupboard
I have no space, so my [bike|ladder] hangs on a [wall|hook]. | I have so little space that I [eat in bed|sold my sofa].
Space is precious to me, so I own [two|three|four] plates. | I live in [one room|an attic|a hut|a van] and must save space.
I had no space for a [table|desk|sofa|bookcase] in my flat. | I fold my [table|desk|bed] away [each night|daily] to win space.
I only buy small [lamps|pots|plants], as space is short.
I have no space for a second [pot|pan|chair]. | Too little space is my biggest problem [these days|right now|at home].
= tradition | the asker likes things done the old way | I like to do it as my grandparents did | old customs mean a lot to me
By tradition, I bake [bread|pie|buns] every [Friday|week]. | I keep up every tradition at [Christmas|Easter|harvest].
I am [sad|cross] when an old tradition [dies out|ends]. | I teach my nephew every tradition of our [village|valley|town].
I love tradition and cook like my [gran|great-aunt|mother]. | Sunday [lunch|tea] with my [parents|aunt] is a dear tradition.
I prefer an old tradition to any new [fashion|idea|trend]. | Our [lantern|bonfire] tradition is very dear to me.
I write [letters|cards|invitations] by hand, in the traditional way I love.
= allergies | the asker reacts badly to many things | nuts make me very ill | I sneeze at the slightest dust
I read [labels|menus|recipes|lists] twice, due to my allergies. | I left the [cafe|wedding|cinema|inn] because of my allergies.
I always carry [pills|drops] for my allergies [with me|in my bag]. | I am allergic to [nuts|eggs|milk|wheat] and very careful.
My allergies make me sneeze all [spring|May|June|summer]. | My allergies are bad, so I ask [cooks|bakers] about [nuts|milk].
Dust is awful for my allergies [at work|all year].
My allergies [got worse|kept me indoors] again today. | I never eat [cake|soup|salad] without asking, due to my allergies.
= quality | the asker wants things that last | shoddy work annoys me | one good thing is better than three bad ones
I look for quality, so I own one good [coat|knife|pan|bag]. | Quality matters to me, so I check every [seam|screw|button].
I waited months for a [chair|lamp|watch] of real quality. | I sent the [boots|shirt|pen|pan] back, as the quality was poor.
I ask the [baker|butcher|tailor] about quality before I buy. | Poor quality makes me angry, even in a [pen|spoon|zip|sock].
My [father|aunt|boss] taught me to look at quality. | I only trust [shops|tailors] that care about quality.
High quality is what I want in [everything I own|all that I buy|every tool].
= safety | the asker worries about accidents | I often worry about accidents | nobody should get hurt | I like to be careful
Safety comes first for me, so I wear [a helmet|boots|gloves]. | I checked the [ladder|stove|heater|lamp] twice for safety.
I took a course on [fire|water|road|kitchen] safety last month. | I bought a [fire blanket|smoke alarm|torch|lock] for safety.
I never use a [saw|grill|boat|ladder] without thinking of safety. | I never feel safe on [ladders|icy paths|bridges|boats].
I ask about safety before I [join|rent|try] anything.
After my [fall|crash], safety is always on my mind. | My boss laughs, but I read all safety [rules|signs|notes|leaflets].
= pets | a cat and a dog share the asker's home | a curious cat climbs over all I own | the dog chews whatever lies around
I moved here because my pets need a [garden|yard|field|lawn]. | My pets come first, so I feed them before [breakfast|work|tea].
I never leave my pets alone for [a whole day|long|a night]. | My pets rule the [sofa|bed|kitchen|hall], and I love them.
I take my pets along [to work|to the lake|on the bus]. | I spend [all|most] [evenings|Sundays|mornings] with my pets.
My pets chew everything, so I hide my [shoes|books].
I knitted a [blanket|coat] for my pets, as I adore them. | I turned down a [flat|job|house] because it did not allow pets.
= weather | rain and storms come quickly here | it rains here without warning | I need a plan for wet days
Every [plan|trip|day] of mine starts with the weather. | I check the weather [twice|again] before I leave [home|work].
Bad weather ruined my [barbecue|wedding|match], so I plan well. | I keep [an umbrella|boots|a raincoat] ready for any weather.
Our weather is wild, so I plan for [rain|storms|wind|hail]. | The weather decides whether I [cycle|swim|walk] or stay inside.
Wet weather spoils my mood, so I look for [cover|sunshine].
I cancelled [golf|tennis] because of the weather again. | I write down the weather [daily|each evening|at noon], as it matters.
= travel | the asker is often away from home | I am away from home every other week | I live out of a suitcase
I love to travel, and my [suitcase|rucksack|passport] is ready. | My [job|boss] makes me travel [every week|most weeks|a lot].
I keep my holidays for travel to [islands|cities|Asia|Peru]. | I learned [Spanish|Greek|Polish|Thai], because I love to travel.
I travel by [train|ferry|night bus|coach] in every free week. | I travel so much that my [plants|tomatoes|roses|ferns] dry out.
Travel is my life, so I own [little|few clothes]. | I read about travel [in bed|at lunch] and dream of [Rome|Rio].
Next month I travel again, as I do every [spring|summer|autumn].
= health | a doctor told the asker to live better | my doctor told me to look after myself | my blood pressure is too high
My health comes first, so I gave up [sugar|smoking|beer|wine]. | I eat [carrots|apples|cabbage|oats] every day for my health.
After my [illness|bad winter], my health matters most. | I see [my doctor|a nurse] [twice|once] a year to check my health.
I drink [water|ginger tea|green tea] every day for my health. | I worry about my health and check my [pulse|weight] daily.
Good health is worth more to me than [gold|success].
I changed my [diet|job|habits], as my health was poor. | To stay healthy, I take the stairs to the [fifth|sixth|ninth] floor.
= comfort | the asker likes things soft and warm | I like it soft and warm | hard seats make me ache
I love comfort, so I bring my own [cushion|pillow|slippers]. | I choose [shoes|jackets|hats|chairs] for comfort, not looks.
I need comfort, as my back hurts on [hard chairs|benches]. | I always look for comfort [on trains|in cinemas|in hotels|at work].
The [bench|stool|tent] had no comfort, so I left early. | I love the comfort of a soft [blanket|chair|jumper|bed|rug].
Give me comfort, and I am happy in any [place|chair].
I only feel well in comfortable [clothes|shoes]. | I gave my stiff [collar|boots|mattress] away, as I want comfort.
= friends | the asker likes to do things together | I like company in all I do | my old school mates want to join in
I do everything with my friends, even [shopping|cooking|sport]. | I see my friends before [work|lunch] and [at night|after it].
My friends come over every [Friday|Sunday|week], and I love it. | I love my friends, so I call them [daily|a lot|every night].
I moved back here because I missed my friends [so much|badly]. | I share my [car|lunch|bike|garden] with my friends.
I ask my friends before I decide on [a haircut|anything].
I keep [Sundays|Fridays|evenings] free for my friends. | My best friends live [next door|upstairs|nearby], and I love that.
= nature | the asker feels best among trees and birds | birds and wild flowers make me happy | I want to see green around me
I love nature, so I spend [Sundays|evenings] in the woods. | Nature makes me happy, and I know every [bird|tree|frog] here.
I moved to a [valley|lake|village|farm] to be near nature. | I need nature, so I grow [herbs|ferns|moss|ivy] at every window.
I draw [leaves|beetles|birds], because I find nature beautiful. | I feel [sad|ill] when I am far from nature [too long|again].
A day without nature feels [empty|wrong|grey] to me. | I would swap any [city|shop] for an hour in nature.
I watch nature from my window [at dawn|for hours|every evening] and feel happy.
= history | the asker loves the past | I want to know how people lived long ago | old stones and stories fascinate me
I love history and read about [Rome|knights|Vikings|queens]. | I own many [thick|old|heavy] history books, and I want more.
I ask about the history of every old [church|castle|bridge|tower]. | I want to know the history of every [house|street|coin].
I collect [coins|old maps|stamps|flags], because I love history. | I study the history of my [village|street|town] with joy.
History is my passion, so I visit [ruins|archives]. | I dream of meeting [Caesar|a knight], as I love history.
I talk about history so much that my [boss|uncle|barber|sister] yawns.
= music | the asker cannot be without a tune | I sing and hum all day | a good tune cheers me up
I cannot live without music, so my [radio|piano] is always on. | Music makes me happy, and I sing [at work|in the bath|in bed].
I love the music of every [film|ballet|opera|band] I hear. | I play music in a [brass|jazz|street] band every [Monday|weekend].
I need music when I [cook|iron|clean|paint] at home. | I fell in love with [jazz|folk|choir|piano] music at school.
For me, [no day|no meal] is complete without good music.
I hear music even in [rain|trains|footsteps]. | I choose every [cafe|pub|shop|bar] by the music they play.
= exercise | the asker needs to move | I have to move every day | sitting still makes me restless | I want to get out of breath
I need exercise, so I [run|swim|cycle|row] before work. | Exercise keeps me happy: [forty|fifty] [push-ups|sit-ups] a day.
I get restless without exercise, even on [Sundays|trains]. | I do my exercises [at home|on the stairs|at work|in bed] daily.
I [walk|run|cycle] to [work|town] because I want more exercise. | My legs long for exercise after [an hour|a day] of work.
I never skip exercise, not even [in snow|at Christmas].
I live near the [pool|gym], because I love exercise. | Exercise is the best part of my [day|week|morning].
= sleep | the asker is often tired | I wake up at the slightest thing | I must be in bed by nine | after a bad night I am no use
I need my sleep, so I go to bed at [eight|nine|sunset]. | I sleep badly, so I drink no [coffee|cola] after [lunch|noon].
I want my sleep, so my phone stays [off|in the hall|in a box]. | I left the [party|wedding|film] at [nine|ten] to get my sleep.
Without enough sleep, I am [cross|useless|grumpy|dizzy] all day. | I bought [curtains|a pillow|a mask|a blind] for better sleep.
Good sleep matters more to me than [dinner|fun|films].
I lie awake for hours and long for sleep [again|now]. | My sleep is light, so I [read|stretch|bathe] before bed.
= photos | the asker keeps every moment in pictures | I want to keep every moment | my camera goes where I go
I take photos of everything, even my [lunch|shoes|soup|tea]. | My [hall|kitchen|office] is full of photos, and I want more.
I love photos, so I bring my camera [everywhere|to work|to bed]. | Good photos make me happy, so I get up at [dawn|five|six].
I took [ninety|fifty|sixty] photos of one [tree|bridge|cloud]. | I love to send my [aunt|sister|uncle|niece] new photos.
Without photos I forget things, so I [take many|take lots].
My photos of [doors|roofs] mean a lot to me. | I keep my photos of every [meal|walk|birthday] in thick albums.
"""

# Posts without a concern. The last six are kept out of train.
CHAT = """
The [bakery|stall] on the corner sells [cheese|onion|plum] rolls on [Mondays|Fridays].
The postman brought me a letter for number [six|nine|twelve] [today|again|yesterday].
They painted the [bus stop|post office|town hall] [white|green|blue|pink] this week.
I finished a [crime|sea|ghost] novel, and the ending [surprised|puzzled|amused] me.
The moon looked very [big|yellow|round] [last night|on Monday|this evening|again].
Who knows a word for [happy|clever|funny|small] with [six|seven|nine] letters?
My [aunt|cousin|uncle] sent me a postcard with a [lighthouse|camel|tram|ship].
I lost [one glove|my pen] and found a [coin|button|pencil] [indoors|today].
I had [pasta|pancakes|curry|fish] and a [pear|plum|peach] for dinner today.
Our team won [two|three|four] to [one|nil] on [Saturday|Tuesday]. | My neighbour bought a [red|green|blue] [car|bike|van] today.
I dreamt about a [talking|flying] [spoon|train|tree] last night. | I mix up [left and right|June and July|six and nine].
The shop had no [lemons|eggs|candles|stamps] left [today|again].
My haircut came out [shorter|darker] than [planned|I thought].
A [tall|thin|bald] man asked me the way to the [bank|harbour|station]. | The lift at work was stuck [for an hour|again|today].
I cannot decide between [tea|juice|milk] and [cocoa|lemonade] today. | My pen ran out in the middle of [a letter|a word|a list].
I tried [mango|pear|ginger] jam on [toast|crackers] this morning. | I bought [blue|red|grey] socks and a [spoon|comb|pen] today.
"""


if __name__ == "__main__":
    main()
