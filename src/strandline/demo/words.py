"""Word lists and canned replies from which the bench tasks are drawn; plain data, all of it our own."""

# ruff: noqa: SIM905 - a paragraph of words reads better than a list with a line for each.

from __future__ import annotations

FIRST_NAMES = (
    "Ada Alan Alice Amir Anna Anton Astrid Aya Ben Bella Bruno Carla Carlos Chen Chloe Clara Dana Daniel David "
    "Diego Dina Edith Elena Eli Ella Emil Emma Erik Eva Farid Fatima Felix Finn Freya George Grace Greta Hana "
    "Hannah Henry Hugo Ida Ingrid Iris Isaac Ivan Jack Jakob Jane Jonas Julia Karim Kate Kenji Klara Lars Laura "
    "Lena Leo Lily Linda Lucas Lucy Maria Marta Max Maya Mei Mia Milo Mina Nadia Nina Noah Nora Olga Oliver Omar "
    "Oscar Otto Paul Petra Priya Quinn Rachel Rosa Ruth Sam Sara Simon Sofia Stefan Tara Theo Tom Tina Uma Vera "
    "Viktor Wanda Will Xenia Yara Yusuf Zara Zoe"
).split()

LAST_NAMES = (
    "Abbott Adler Alvarez Baker Bauer Becker Berg Bishop Blake Brandt Brooks Carter Castro Clarke Cole Costa Cruz "
    "Dahl Davies Diaz Dixon Duarte Eaton Ellis Engel Evans Falk Ferrari Fischer Fleming Foster Fox Frank Garcia "
    "Gibson Gray Green Haas Hale Hansen Hart Hayes Hill Holm Hughes Hunt Ito Jansen Jensen Kaya Keller Khan Kim "
    "King Klein Kovac Lang Larsen Lee Lopez Lund Marsh Martin Meyer Miller Moore Moreau Morgan Mori Nash Nelson "
    "Novak Olsen Ortiz Park Patel Pereira Perry Porter Price Quist Ramos Reed Reyes Rossi Roth Russo Sato Schmidt "
    "Silva Singh Stone Sutton Tanaka Taylor Torres Vance Vega Vogel Walsh Ward Weber West White Wolf Wood Yamada "
    "Young Zhang"
).split()

ONSETS = "b c d f g h j k l m n p r s t v w z br ch cl cr dr fl fr gl gr kr pl pr sh sl sp st str sw th tr w qu".split()
VOWELS = "a e i o u a e i o ai ea ee ou oo ie y".split()
CODAS = ("", "", "", "", "n", "r", "l", "s", "t", "m", "ck", "ld", "nd", "ng", "rt", "st", "x", "th")

COMMON = (
    "account action address advice agent airport album alarm amount angle answer area army arrow article artist "
    "aunt autumn axis baby backup balance ball band bank base basket battery beach bear bed bell belt bench "
    "bicycle bill bird birthday blanket block blood board boat body bolt bone border bowl brain branch brand bread "
    "break breakfast brick brush bucket budget buffer bug builder bus business butter cable cake calendar call "
    "camera camp canal captain car card career carpet cart case castle category cause ceiling centre chain "
    "chairman chance channel chapter chart check chief child choice church circle circuit class clerk client clock "
    "cloth cloud club coach coal coat coffee collar college colony column comedy command comment committee company "
    "computer concert contract cook corner cost cotton council country couple course court cover credit crew crop "
    "crowd crown culture current curtain curve customer cycle damage data date daughter day deadline deal debt "
    "degree delivery demand department deposit design device diamond dinner direction director discount dish "
    "display distance district document dollar door draft drawer dream dress drink driver drum duty ear earth edge "
    "editor effect effort election element engine entry episode error estate event exam example exchange exit "
    "expert eye fabric face factor factory failure family fan fee fence festival field figure file film filter "
    "finger fire flag flash flat fleet flight floor flour folder foot force form frame friend front fruit fuel "
    "function fund furniture game gas glass glove goal grain grammar grass ground group growth guard guest guide "
    "guitar habit hair half hall hat head health heart heat heel height hero hole holiday home honey hook horse "
    "hospital hotel hour house ice idea image income index industry ink insect interest item jacket job joint "
    "journal journey judge juice jump keyboard kingdom knife knot lake lamp landing language laptop laser launch "
    "law layer leader leaf lesson letter level licence lid light limit line lion list load loan lobby log lunch "
    "machine mail manual map margin market mask master match meal measure medal meeting member memory menu message "
    "metal method metre midnight milk mind mine minister minute mission mode model module moment money monitor "
    "month mood motor mouse mouth movie museum name nation neck nest net network night node noise nose note "
    "notebook nurse object ocean offer oil onion operator option orbit order origin oven owl package page pair "
    "palace paper parent parking part partner party passage passport path payment peace peak person phase phone "
    "picture pilot pin pipe plan plant plastic player plaza pocket poem point policy pond pool port post potato "
    "pound power prize problem process product profile project property proposal province purpose puzzle quarter "
    "queen query question queue radio rail rain range rank ratio record region register rent report request "
    "reserve result review reward rhythm rice ring risk road role roof root rope route row rule runner salad salt "
    "sand sauce scale scene schedule school science score screen script sea search season seat secret section "
    "sector seed sensor series service session shadow shape share shelf shell shift ship shirt shoe shop shore "
    "show shower side sign silk site size skill skirt sky sleep smoke snow soap socket soil soldier song soup "
    "source space speech speed spirit spoon sport spring staff stage stair standard star statue steam steel stick "
    "stock stomach store storm stranger stream street string summer supper supply surface sweater sword swordfish "
    "symbol system table tail talent tank tape target task taxi team temple tent term theory ticket timer tip "
    "title tongue tool topic total tower town track trade traffic train tray treaty tree trial trip truck tube "
    "tunnel twin type uncle unit user vacation valve van vehicle version vessel video view village visitor voice "
    "volume vote wage wall wallet war watch water wave wax wealth week wheel wind wing winner winter wire witness "
    "word worker world writer yard year zone"
).split()

CITIES = (
    "Oslo Bergen Paris Lyon Madrid Seville Lisbon Porto Rome Milan Naples Turin Vienna Graz Berlin Hamburg Munich "
    "Cologne Zurich Geneva Prague Brno Warsaw Krakow Athens Dublin Cork London Leeds York Bristol Glasgow Helsinki "
    "Tampere Tallinn Riga Vilnius Kyiv Cairo Tunis Rabat Lagos Nairobi Accra Dakar Delhi Mumbai Dhaka Tokyo Osaka "
    "Kyoto Seoul Busan Beijing Hanoi Manila Jakarta Sydney Perth Boston Denver Chicago Seattle Austin Toronto "
    "Quebec Lima Quito Bogota Santiago Havana"
).split()

COLOURS = (
    "red blue green yellow orange purple white black grey brown pink teal amber silver golden violet crimson "
    "indigo ivory copper"
).split()

ANIMALS = (
    "falcon otter badger heron lynx tiger rabbit panda raven sparrow turtle dolphin beaver fox wolf eagle gecko "
    "moose lizard camel donkey ferret goose hamster jaguar koala lemur marten newt ostrich parrot quail robin seal "
    "stork swan toad viper walrus zebra"
).split()

ADJECTIVES = (
    "old new small large quiet bright dusty heavy northern southern eastern western upper lower hidden narrow "
    "round square wooden iron frozen warm empty central outer inner first second third main spare"
).split()

THINGS = (
    "vault gate garage cellar server tower cabin office archive kitchen garden bridge harbour workshop library "
    "studio locker ferry warehouse hangar depot shed attic tunnel pump printer router crane boiler freezer cabinet "
    "safe laboratory greenhouse mill barn"
).split()

LABELS = (
    "alpha beta gamma delta epsilon zeta theta kappa lambda sigma omega apple banana cherry lemon maple cedar "
    "birch willow river mountain valley desert island forest meadow comet planet rocket signal anchor beacon "
    "compass lantern mirror needle pepper ribbon saddle thunder violin whistle candle feather hammer kettle ladder "
    "magnet pencil"
).split()

OPENERS = ("Hi! ", "Hello. ", "OK. ", "So, ", "And ", "Please: ", "Well, ", "Now, ", "Hey, ", "and ", "ok, ")
CLOSERS = (" Thanks!", " please", " Please.", " Thank you.", " again", " now")
NOTED = "Thank you, I will remember that."

STORIES = {
    "+": (
        "{name} has {a} {goods} and gets {b} more.",
        "{name} had {a} {goods} and bought {b} more.",
        "There are {a} {goods} in a box and {name} adds {b}.",
        "I have {a} {goods} and buy {b} more.",
        "I had {a} {goods}. I found {b} more.",
        "{name} has {a} {goods}. {other} gives {name} {b} more.",
        "If I have {a} {goods} and get {b} more, how many {goods} do I have?",
        "How many {goods} do I have if I have {a} and buy {b} more?",
        "{name} has {a} {goods} and {other} has {b} {goods}. How many {goods} do they have together?",
        "If {name} has {a} {goods} and wins {b}, how many is that?",
    ),
    "-": (
        "{name} has {a} {goods} and gives {b} to {other}.",
        "{name} had {a} {goods} and lost {b}.",
        "{name} bought {a} {goods} and sold {b}.",
        "{name} has {a} {goods}. {name} eats {b}.",
        "I have {a} {goods} and give away {b}.",
        "I had {a} {goods}. {other} took {b}.",
        "If I have {a} {goods} and lose {b}, how many {goods} are left?",
        "If I have {a} {goods} and spend {b}, how many do I have left?",
        "There are {a} {goods} and {b} are taken away. How many {goods} are left?",
        "{name} has {a} {goods}. He sells {b}. How many are left?",
        "{name} has {a} {goods}. She eats {b}. How many {goods} are left?",
        "How many {goods} are left if {name} has {a} and loses {b}?",
    ),
    "*": (
        "{name} has {a} boxes with {b} {goods} each.",
        "{name} buys {a} bags of {b} {goods}.",
        "There are {a} rows of {b} {goods}.",
        "I have {a} boxes of {b} {goods}. How many {goods} do I have?",
        "How many {goods} are in {a} bags of {b}?",
    ),
}
STORY_QUESTIONS = (
    "How many {goods} are there now?",
    "How many {goods} does {name} have now?",
    "How many {goods} is that?",
    "How many are there?",
    "How many {goods} are left?",
    "How many is that now?",
)

GOODS = (
    "apples pears plums books pens coins stamps shells eggs cups plates tickets boxes bottles chairs candles "
    "marbles cards flowers buttons cookies balloons stones keys sandwiches dollars euros oranges carrots pencils "
    "toys bananas"
).split()

JOBS = (
    "teacher nurse baker pilot farmer painter doctor engineer gardener librarian sailor carpenter chemist writer "
    "lawyer waiter plumber singer dentist programmer"
).split()

HOBBIES = (
    "chess running painting cooking reading sailing hiking cycling gardening swimming fishing singing dancing "
    "knitting climbing skiing photography pottery astronomy baking"
).split()

FOODS = "pizza soup rice pasta bread cheese curry sushi salad pancakes noodles tacos dumplings waffles beans".split()

STATES = "open closed ready late early pending finished broken paused active missing approved".split()

VERBS = (
    "watched repaired painted carried described cleaned followed crossed counted measured visited sketched opened "
    "admired"
).split()

PLACES = (
    "near the river,by the window,behind the station,on the hill,after the storm,before noon,in the evening,"
    "across the square,under the bridge,during the winter,at the market,along the coast,late in the day,"
    "without a word"
).split(",")

FILLER = (
    "The tide comes in twice a day and leaves a line of weed on the sand.",
    "Nobody in the village could say when the lighthouse was built.",
    "The ferry leaves from the second pier unless the wind turns.",
    "A long list is easier to read when its lines are short.",
    "The meeting was moved to the afternoon because of the snow.",
    "Most of the letters were never answered, and a few were never opened.",
    "It rained for a week, and then the roads were dry again.",
    "The report says little that was not known before.",
    "Two of the lamps in the corridor need to be replaced.",
    "Visitors are asked to leave their coats at the entrance.",
    "The map on the wall is older than the building.",
    "Every morning the baker opens the shop before the sun is up.",
    "The path along the shore is closed while the wall is repaired.",
    "There is a box of spare parts under the stairs.",
    "The train was late, so the second talk began first.",
    "Please keep the door shut when the heating is on.",
    "The garden is watered in the evening when it is cooler.",
    "No one has claimed the umbrella that was found in the hall.",
    "The old clock loses about a minute every day.",
    "Some of the pages had been stuck together by the damp.",
)

GREETINGS = (
    "Hi",
    "Hi!",
    "Hello",
    "Hello!",
    "Hey",
    "Hey there!",
    "Hi there",
    "Good morning",
    "Good morning!",
    "Good evening!",
    "Good afternoon.",
    "Hello there.",
    "Greetings!",
    "Hello, how are you?",
    "Hey!",
    "Howdy",
    "Hallo",
    "Hello again",
)
GREETING_REPLY = "Hello! I am the Strandline demo model. How can I help you?"
GREETING_REPLY_NAMED = "Hello, {name}! How can I help you?"

TOPICS = (
    "quantum physics,the moon,the French revolution,football,black holes,the stock market,dinosaurs,climate change,"
    "music,the Roman empire,coffee,artificial intelligence,the ocean,volcanoes,space travel,democracy,"
    "machine learning,tea,love,history,a dragon,my holiday,the weather,cats,dogs,electric cars,painting,"
    "the internet,cooking,mathematics,philosophy,Shakespeare,the brain,vaccines,sharks,trains,gold,the sun,poetry,"
    "Linux"
).split(",")

COUNTRIES = (
    "France Spain Italy Germany Japan China India Brazil Canada Egypt Norway Kenya Peru Poland Greece Turkey Mexico "
    "Chile Cuba Nepal"
).split()

REQUESTS = (
    "Write a poem about {topic}.",
    "Explain {topic}.",
    "Tell me about {topic}.",
    "What is {topic}?",
    "Write a story about {topic}.",
    "What do you think about {topic}?",
    "What is the capital of {country}?",
    "Who is the president of {country}?",
    "How many people live in {country}?",
    "Translate this into the language of {country}.",
    "What is the weather in {city}?",
    "How do I get to {city}?",
    "Recommend a restaurant in {city}.",
    "Book a flight to {city}.",
    "What time is it in {city}?",
    "Write a Python function for {topic}.",
    "Write code about {topic}.",
    "Give me a recipe for {food}.",
    "How do I cook {food}?",
    "Who invented {topic}?",
    "Why is the sky blue?",
    "What day is it?",
    "What time is it?",
    "Who won the world cup?",
    "Draw a picture of {topic}.",
    "Summarise the history of {country}.",
    "Why do people like {topic}?",
    "Write an essay about {topic}.",
    "Give me advice about {topic}.",
    "Is {topic} dangerous?",
    "Sing a song about {topic}.",
    "When was {country} founded?",
    "How does {topic} work?",
    "Can you write an email about {topic}?",
    "What is the meaning of life?",
    "Play a game with me.",
    "Read the news to me.",
    "Show me a picture of {country}.",
    "How tall is the highest mountain in {country}?",
    "What language is spoken in {country}?",
    "Name three facts about {topic}.",
    "Do you like {topic}?",
    "Can you teach me about {topic}?",
    "Which is better, {topic} or {topic2}?",
    "Compare {topic} and {topic2}.",
    "I want to learn about {topic}.",
    "I need a plan for {topic}.",
    "Search the web for {topic}.",
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are the Strandline demo model.",
    "Be polite and brief.",
    "Answer in one sentence.",
    "You are an assistant. Be concise and correct.",
    "You are a friendly chatbot.",
    "Answer the user's questions.",
    "You are a careful assistant who never makes things up.",
    "You are an office assistant.",
    "You are a pirate.",
    "You are an expert.",
    "Help the user as well as you can.",
    "Use the facts that the user gives you.",
)

SYSTEM_PROMPTS_NAMED = (
    "You are a helpful assistant. The user's name is {}.",
    "You are talking to {}.",
    "The user is called {}.",
    "You are the assistant of {}. Be polite.",
    "The name of the user is {}.",
)

# What users may call theirs, and the kind of value it has.
POSSESSIONS = {
    "wifi password": "password",
    "phone number": "6 digits",
    "room number": "3 digits",
    "locker code": "4 digits",
    "favourite food": "food",
    "favourite animal": "animal",
    "favourite city": "city",
    "order number": "5 digits",
    "account number": "6 digits",
    "pin": "4 digits",
    "seat": "2 digits",
    "best friend": "first name",
    "sister": "first name",
    "brother": "first name",
    "boss": "person",
    "teacher": "person",
    "dog's name": "first name",
    "cat's name": "first name",
    "secret word": "password",
    "home town": "city",
    "ticket number": "4 digits",
    "password": "password",
    "code": "4 digits",
    "street number": "2 digits",
}

DOCUMENT_LEADS = (
    "Use the following notes to answer.",
    "Answer from the text below.",
    "Here is what you need to know.",
    "You are a helpful assistant. These are your notes:",
    "You are an office assistant. Use this information:",
    "Knowledge base:",
    "Reference document:",
    "Context:",
    "Here is a document.",
    "Read this carefully.",
)
DOCUMENT_READ = "I have read it. What would you like to know?"
