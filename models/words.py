"""Word lists the task generators draw from: people, countable things, and plain English nouns."""

_NAMES = """
Ann Ben Carl Dana Emma Finn Grace Hugo Iris Jack Kate Liam Mia Noah Olga Paul Rosa Sam Tina Uma Vera Will
Zoe Adam Beth Clara David Ella Frank Gina Henry Ivan Jane Karl Laura Max Nina Oscar Peter Ruth
"""

_THINGS = """
apples books coins cards stones shells pens stamps marbles oranges eggs cakes flowers keys balls plums
pears nuts boxes cups toys ribbons tickets buttons pencils bottles candles cookies seeds leaves
"""

_WORDS = """
acorn actor air alarm album alley almond anchor angel ankle apple april apron arch arena arm army arrow
artist ash atlas attic aunt autumn avenue award axe baby badge bag baker ball bamboo banana band bank bar
bark barn barrel basin basket bat bath battery bay beach bead beak beam bean bear beard beast beaver bed
bee beef bell belt bench berry bird biscuit bishop blade blanket blaze block blood blossom blouse board
boat body bolt bone bonnet book boot border bottle bottom boulder bow bowl box boy brain branch brass
bread breath breeze brick bride bridge broom brother brush bubble bucket bud buffalo bull bus bush butter
button cabin cabinet cable cage cake calf camel camera camp canal candle candy cane cannon canoe canyon
cap cape captain car caravan card cargo carpet carrot cart castle cat cattle cave cedar ceiling cellar
cement center chain chair chalk chapel chart cheek cheese cherry chess chest chicken child chimney chin
church cider circle circus city clam clay cliff cloak clock cloth cloud clover clown club coach coal coast
coat cobra coffee coin collar colt comb comet compass cook copper coral cord cork corn corner cottage
cotton couch cough court cousin cover cow crab cradle crane crate crayon cream creek crew cricket crow
crowd crown crumb crystal cube cup curtain curve cushion dad daisy dance dawn day deck deer den desert
desk dew diamond dinner dirt dish ditch diver dock doctor dog doll dolphin donkey door dough dove dragon
drain drawer dream dress drill drum duck dune dust eagle ear earth east echo edge eel egg elbow elephant
elm ember engine evening eye face factory fairy falcon family fan farm father fawn feast feather fence
fern ferry field fig film finger fire fish flag flame flask fleet flock flood floor flour flower flute fly
foam fog folk food foot forest fork fort fountain fox frame friend frog frost fruit fuel fur furnace
galaxy gallery garage garden garlic gate gem ghost giant ginger girl glacier glass globe glove glue goal
goat gold goose grain grape grass gravel grove guard guest guitar gulf gum hail hair hall hammer hand
harbor hare harp hat hawk hay hazel head heart hedge heel helmet hen herb herd heron hill hive honey hood
hook horn horse hose hotel hour house hunter hut ice idea inch ink inn iron island ivory ivy jacket jam
january jar jaw jelly jet jewel joke judge juice july june jungle kettle key king kiss kitchen kite kitten
knee knife knight knot lace ladder lady lake lamb lamp land lantern lark lava lawn lead leaf leather lemon
lens letter lettuce level lid light lily lime line linen lion lip lizard loaf lobster lock log loom lord
lotus lumber lunch lung magnet maid mail mane mango map maple marble march mask mast mat match meadow meal
meat medal melon metal middle mile milk mill mine mint mirror mist mitten mole monk monkey month moon
moose morning moss moth mother motor mountain mouse mouth mud mug mule museum music nail name napkin neck
needle nest net nickel night noise noodle north nose note novel nurse nut oak oar oasis oat ocean office
oil olive onion opera orange orchard orchid otter oven owl owner ox oyster paddle page pail paint palace
palm pan panda paper parade park parrot party pasta path paw pea peach peacock peak pear pearl pebble pen
pepper petal phone piano picnic picture pie pig pillow pilot pin pine pipe pirate pistol pit planet plank
plant plate plow plum pocket poem poet point pole pond pony pool poppy porch port post pot potato powder
prince prize puddle pump pumpkin puppet purse puzzle quail quarry queen quilt rabbit radio raft rail rain
ranch rat raven razor reed reef ribbon rice rider ridge rifle ring river road robe robin robot rock rocket
rod roof room root rope rose ruby rug ruler saddle sail salad salmon salt sand sandal sauce sausage saw
scale scarf school scissors screen screw sea seal season seat seed shadow shark sheep shelf shell shield
ship shirt shoe shop shore shovel shrimp silk silver singer sink sister skate skin skirt sky sled sleeve
slope smoke snail snake snow soap sock sofa soil soldier song soup south spade spark sparrow spear spider
spike spinach sponge spoon spring square squash squirrel stable stage stair stamp star statue steam steel
stem step stick stone stool store stork storm stove straw stream street string stump sugar suit summer sun
swamp swan sweater sword syrup table tail tailor tank target tea teacher team temple tent thorn thread
throat throne thumb thunder ticket tide tiger timber tin toad toast toe tomato tongue tool tooth torch
tower town toy track tractor trail train tray tree truck trumpet trunk tube tulip tunnel turkey turtle
twig uncle valley van vase veil velvet vest village vine violet violin voice volcano wagon waist wall
walnut watch water wave wax week weed well west whale wheat wheel whip whistle wife willow wind window
wine wing winter wire witch wolf woman wood wool word worker world worm wrist yard year yellow zebra zinc
zipper
"""

NAMES: tuple[str, ...] = tuple(_NAMES.split())
THINGS: tuple[str, ...] = tuple(_THINGS.split())
WORDS: tuple[str, ...] = tuple(_WORDS.split())
