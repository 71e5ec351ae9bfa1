"""Forty packages that scripts of data work, parsing and office files use most, each with a few lines that use it.

The value is the script's; each must return something true. Names are those of PyPI.
"""

USUAL = ["matplotlib", "numpy", "pandas", "pillow", "plotly", "requests", "scipy", "seaborn"]
"""An environment that several tests use. To make it takes longer than to use it."""

USES: dict[str, str] = {
    "numpy": "import numpy as np; return int(np.arange(6).reshape(2, 3).sum()) == 15",
    "pandas": "import pandas as pd; return pd.DataFrame({'a': [1, 2]}).a.mean() == 1.5",
    "matplotlib": "import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.savefig('a.png'); return open('a.png', 'rb').read(4)[1:] == b'PNG'",
    "scipy": "from scipy import stats; return round(float(stats.norm.cdf(0)), 3) == 0.5",
    "scikit-learn": "from sklearn.linear_model import LinearRegression as L; return round(float(L().fit([[0], [1]], [0, 2]).coef_[0])) == 2",
    "seaborn": "import seaborn as sns, pandas as pd; return sns.barplot(pd.DataFrame({'x': [1], 'y': [2]}), x='x', y='y') is not None",
    "statsmodels": "import statsmodels.api as sm; return len(sm.OLS([1, 2, 4], sm.add_constant([1, 2, 3])).fit().params) == 2",
    "polars": "import polars as pl; return pl.DataFrame({'a': [1, 2]}).lazy().select(pl.col('a').sum()).collect().item() == 3",
    "pyarrow": "import pyarrow as pa, pyarrow.parquet as pq; pq.write_table(pa.table({'a': [1]}), 'a.parquet'); return pq.read_table('a.parquet').num_rows == 1",
    "duckdb": "import duckdb; return duckdb.connect().execute('select 40 + 2').fetchone() == (42,)",
    "sympy": "import sympy; return sympy.integrate(sympy.Symbol('x')).has(sympy.Symbol('x'))",
    "networkx": "import networkx as nx; return nx.shortest_path(nx.path_graph(3), 0, 2) == [0, 1, 2]",
    "plotly": "import plotly.graph_objects as go; return 'data' in go.Figure(go.Bar(y=[1])).to_dict()",
    "altair": "import altair as alt, pandas as pd; return 'mark' in alt.Chart(pd.DataFrame({'a': [1]})).mark_bar().encode(x='a').to_dict()",
    "pillow": "from PIL import Image; Image.new('RGB', (2, 2)).save('b.png'); return Image.open('b.png').size == (2, 2)",
    "openpyxl": "import openpyxl; w = openpyxl.Workbook(); w.active['A1'] = 3; w.save('a.xlsx'); return openpyxl.load_workbook('a.xlsx').active['A1'].value == 3",
    "xlsxwriter": "import xlsxwriter; b = xlsxwriter.Workbook('c.xlsx'); b.add_worksheet().write(0, 0, 1); b.close(); return open('c.xlsx', 'rb').read(2) == b'PK'",
    "xlrd": "import xlrd; return xlrd.__version__",
    "python-docx": "import docx; d = docx.Document(); d.add_paragraph('hi'); d.save('a.docx'); return docx.Document('a.docx').paragraphs[0].text == 'hi'",
    "python-pptx": "import pptx; p = pptx.Presentation(); p.slides.add_slide(p.slide_layouts[0]); p.save('a.pptx'); return len(pptx.Presentation('a.pptx').slides) == 1",
    "reportlab": "from reportlab.pdfgen import canvas; c = canvas.Canvas('a.pdf'); c.drawString(9, 9, 'hello'); c.save(); return open('a.pdf', 'rb').read(4) == b'%PDF'",
    "pypdf": "import io, pypdf; w = pypdf.PdfWriter(); w.add_blank_page(9, 9); b = io.BytesIO(); w.write(b); return len(pypdf.PdfReader(b).pages) == 1",
    "pdfplumber": "import pdfplumber; from reportlab.pdfgen import canvas; c = canvas.Canvas('d.pdf'); c.drawString(99, 99, 'hello'); c.save(); return 'hello' in pdfplumber.open('d.pdf').pages[0].extract_text()",
    "lxml": "from lxml import etree; return etree.fromstring('<a><b>1</b></a>').xpath('string(//b)') == '1'",
    "beautifulsoup4": "import bs4; return bs4.BeautifulSoup('<p>x</p>', 'html.parser').p.text == 'x'",
    "html5lib": "import html5lib; return html5lib.parse('<p>x') is not None",
    "pyyaml": "import yaml; return yaml.safe_load('a: [1]') == {'a': [1]}",
    "jinja2": "import jinja2; return jinja2.Template('{{ a }}').render(a=1) == '1'",
    "markdown": "import markdown; return markdown.markdown('# a') == '<h1>a</h1>'",
    "tabulate": "import tabulate; return 'a' in tabulate.tabulate([[1]], headers=['a'])",
    "python-dateutil": "from dateutil import parser; return parser.parse('1 May 2020').year == 2020",
    "pytz": "import pytz; return str(pytz.timezone('Europe/Rome')) == 'Europe/Rome'",
    "regex": "import regex; return regex.fullmatch(r'\\p{L}+', 'é') is not None",
    "rapidfuzz": "from rapidfuzz import fuzz; return fuzz.ratio('a', 'a') == 100",
    "jsonschema": "import jsonschema; return jsonschema.validate(1, {'type': 'integer'}) is None",
    "pydantic": "import pydantic; return pydantic.TypeAdapter(int).validate_python('3') == 3",
    "orjson": "import orjson; return orjson.loads(orjson.dumps({'a': 1})) == {'a': 1}",
    "sqlalchemy": "import sqlalchemy as sa; return sa.create_engine('sqlite://').connect().execute(sa.text('select 1')).scalar() == 1",
    "xmltodict": "import xmltodict; return xmltodict.parse('<a>1</a>') == {'a': '1'}",
    "tqdm": "from tqdm import tqdm; return sum(tqdm([1, 2], disable=True)) == 3",
}
