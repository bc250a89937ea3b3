"""Ordinary words that say nothing about Thunderhead, for questions out of scope and as noise in questions within it."""

NOUNS = """apple banana orange lemon grape cherry potato tomato onion garlic carrot salad soup meat beef pork chicken turkey egg milk
butter sugar salt pepper oil rice pasta noodle sandwich burger cookie cake pie candy juice beer vodka whisky water ice kitchen oven
fridge fork knife spoon plate bowl glass bottle table chair sofa bed lamp window wall floor roof garden lawn tree flower grass leaf
forest river lake ocean beach island desert valley hill mountain cave cloud rain storm wind sky star planet comet rocket astronaut
horse cow pig sheep goat donkey rabbit mouse rat hamster fox wolf bear lion tiger monkey gorilla giraffe zebra camel snake lizard
frog turtle fish salmon tuna shark dolphin bird eagle owl parrot penguin duck goose swan bee ant butterfly worm doctor nurse dentist
teacher student professor lawyer judge police soldier general sailor pilot farmer baker cook waiter painter singer actor dancer
writer poet king queen prince emperor president minister mayor priest monk mother father sister brother uncle aunt cousin baby child
friend neighbour husband wife wedding divorce party holiday vacation birthday christmas easter school university exam homework class
lesson book newspaper magazine letter paper pencil pen ink picture photo camera film movie theatre museum church castle palace tower
bridge street road highway car bus train tram bicycle motorcycle truck ship boat ferry airport hotel restaurant bar shop market bank
money dollar euro coin price salary job career boss office meeting interview strike election vote party law crime prison war peace
army bomb gun sword shield history century empire revolution religion god angel devil heaven hell soul dream sleep fear anger joy
sadness hope luck health disease fever cold flu cough pain headache stomach heart lung liver kidney brain bone skin hair eye ear nose
mouth tooth tongue neck arm hand finger leg knee foot toe shoe sock shirt trousers dress skirt coat hat glove scarf ring necklace
watch clock calendar game ball goal tennis golf hockey baseball basketball boxing skiing surfing swimming running gym muscle diet
vegetarian recipe music song melody drum trumpet flute violin opera ballet statue colour paint red green blue yellow purple brown
number triangle circle square angle equation theorem statistics physics chemistry geography economy trade tax rent house apartment
bathroom shower toilet mirror soap towel shaving perfume makeup haircut battery phone television radio keyboard printer scanner
website blog facebook twitter instagram youtube tiktok email spam password virus antivirus spreadsheet presentation excel word
photoshop android iphone playstation nintendo minecraft fortnite netflix spotify""".split()

VERBS = """eat drink bake fry grill wash clean iron sew knit paint draw sing dance jump climb swim dive ride drive park fly sail walk hike
camp fish hunt plant water harvest feed pet train wear buy sell pay borrow lend steal give gift wrap post mail call invite marry kiss
hug love hate forgive fight argue apologise laugh cry smile sleep dream wake rest relax travel visit book pack move rent decorate
repair glue cut fold tie lift push throw catch kick score win lose bet play teach study memorise read translate spell count add
multiply solve prove photograph film edit record tune whistle cough sneeze bleed heal vaccinate shave comb polish dry freeze melt
boil peel chop mix stir taste smell touch hear see look""".split()

NOISE = """really just maybe somehow basically honestly yesterday today always often again right thing stuff kind sort guys friend boss
colleague team office home desk lab please quickly simply roughly generally usually mostly perhaps probably certainly
anyway though still even already first second finally certain given around about over under very quite rather pretty
I we you they it this that these those my our your their me us them is are was were do does did can could should would will may might
the a an of for from to in on at with by and or but if when while because so than as not no yes what which who where why how""".split()
