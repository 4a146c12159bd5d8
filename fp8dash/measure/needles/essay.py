"""The haystacks that needles are hidden in: noise, an essay of our own, or the corpus. Knows no model.

The essay is plain prose under this project's licence. RULER hides its needles in Paul Graham's essays, which may not be
shipped: whoever wants those, or any other prose, names its file as the corpus and hides the needles there. Changing a
word here changes the prompts: raise needle.METHOD.
"""

import re
from collections.abc import Collection

from fp8dash.errors import CorpusError

ESSAY = """
A good instrument is a promise that somebody kept before you were born. The brass rule on the wall of the old customs
house is worn in the middle, where merchants laid their cloth against it, and nobody has corrected it for two hundred
years. Everyone in the town knows that it is short by the width of a thumbnail. They also know by how much, so it serves
them as well as a perfect one would. What ruins trade is not an error but an error that moves.

My grandfather repaired scales for a living. He carried his weights in a box lined with green felt, and he washed his
hands before he opened it. As a child I thought this was a kind of piety. Later I learned that the grease of a finger
is heavier than the difference he was looking for. He never said that a scale was right. He said that it agreed, and he
always said with what.

There is a story about two villages that shared a mill. The upper village measured its grain in a wide basket, and the
lower village measured in a tall one. Each accused the other of cheating for three generations. In the end a travelling
priest filled both baskets from the same sack and counted how many times he could do it. The tall basket held a little
more when it was shaken and a little less when it was not. The villages had been quarrelling about patience.

Rivers teach the same lesson slowly. The keeper of the lock at the bend writes down the height of the water each
morning, and his father did so before him, and the ink has faded on the oldest pages. Nobody asked for this record. One
year the water stood higher than any line in the book, and the council wanted to know whether the dam had failed. The
keeper turned the pages back until he found a spring with the same slow rise, the same late snow, and no dam at all. A
number by itself had frightened them, and a number with a neighbour calmed them.

People who bake understand proportion better than people who only read about it. A baker does not weigh the salt for a
single loaf with the balance that weighs flour by the sack. The small thing needs the fine balance, and the large thing
forgives the coarse one. If you put both on the same scale you will either break the fine one or lose the salt between
two marks. Half of the craft consists of knowing which quantity deserves the better instrument.

I once spent a winter copying maps in a library where the heating worked only on market days. The oldest charts showed
the coast in great detail wherever there had been shipwrecks. Where the sea was kind the line was drawn with a single
lazy stroke. At first this seemed like negligence. By the end of the winter I thought that it was wisdom, because the
draughtsman had spent his ink where a mistake would cost a ship. Precision is a budget, and the map told me how it had
been spent.

A clock that is always five minutes fast is a good clock with a bad reputation. A clock that is fast in the morning and
slow at night has an honest average and should be thrown away. Most of us are charmed by averages, since they are
polite and give the same answer to everyone. The traveller who missed the last train is not consoled by learning that
trains leave on time in the mean.

The gardener next door keeps two notebooks. In the first she writes what she expects each bed to yield, and in the
second she writes what she carried to the kitchen. She never corrects the first notebook. When I asked her why, she
answered that a guess which has been improved afterwards is a compliment, not a guess. Her beans have not become more
regular over the years, but her guesses have.

It is tempting to believe that a finer mark is always a better mark. The engraver who divides a degree into sixty parts
can divide it into six hundred, and his customers will pay more for the plate. Yet the hand that turns the telescope
still trembles by a tenth of a degree. The extra lines are true and they are useless, and in bad light they are worse
than useless, because the eye slips from one to the next. A rule should be as fine as the hand that holds it.

Sailors used to heave a log on a knotted line and count the knots that ran through their fingers while the sand fell in
a glass. The line shrank when it was wet, and the sand ran faster when it was dry. A careful mate soaked the line before
he measured it and kept the glass in his cabin. He could not make either of them perfect, so he made them wrong in the
same way every day. With that alone he crossed an ocean and came within sight of the harbour he had named.

Teachers know that the question decides the answer. Ask a class how much they have understood and every hand goes up.
Ask them to explain it to the youngest child in the room and the hands come down one by one. Nothing in their heads has
changed between the two questions. The first one measured courage, and the second one measured something closer to what
the teacher wanted to know.

When the bridge was rebuilt the engineers hung bags of sand from the new span for a month. The townspeople complained
that the work was finished and the road still closed. Every evening a boy rowed out with a plumb line and called a
figure up to the bank. The figures grew at first, and then they grew less, and then they stayed. Only when they had
stayed for ten evenings did the engineers take the sand away. The last thing they built was their own confidence, and it
took the longest.

Some losses are so small that they can be found only beside what was lost. Taste a soup alone and you will call it
good. Taste it after the soup from which it was copied and you will notice the missing bay leaf at once. Cooks learn
early to keep a spoonful of the first pot. It is the cheapest instrument in the kitchen, and it never needs to be
repaired.

I have come to distrust the sentence that says nothing has changed. It usually means that nobody looked, or that
somebody looked once with a blunt tool. The better sentence is longer and less comfortable. It says that a change of a
certain size would have been seen, that the looking was done in such a place and in such a way, and that no change of
that size was there. Such a sentence can be wrong, which is the best thing that can be said of it.

In the evening my grandfather put the weights back in their felt, each in the hollow that had been cut for it. He closed
the box with two fingers and wrote a line in his ledger. The line held the name of the shop, the day, the weight that he
had used and the difference that he had found. There was no column for his opinion. When the box came to me I looked for
one, and I understood only then why every merchant in the valley had trusted him.
"""


NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def haystack_of(name: str, corpus: str, special: Collection[str] = ()) -> tuple[str, ...]:
    """The sentences of a haystack; raises CorpusError where the corpus has none.

    Those that spell one of the tokenizer's `special` tokens are left out: inside a chat template, whose own special
    tokens must be read as such, theirs would end the turn.
    """
    if name == "noise":
        return (NOISE,)
    plain = tuple(part for part in sentences({"essay": ESSAY, "corpus": corpus}[name]) if not _spells(part, special))
    if not plain:
        raise CorpusError("Every sentence of the corpus spells a special token: choose the noise haystack.")
    return plain


def _spells(sentence: str, special: Collection[str]) -> bool:
    return any(token in sentence for token in special)


def sentences(text: str) -> tuple[str, ...]:
    """The sentences of a text, for a haystack; raises CorpusError where there are none."""
    parts = [" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+", text)]
    whole = tuple(part for part in parts if 20 <= len(part) <= 400)
    if not whole:
        raise CorpusError("The corpus has no sentences to hide a needle in: choose the noise haystack.")
    return whole
