"""Special values of binary operators: a down the side, b along the top, in the symbols of `tables.py`."""

PAIRS = """
add             -inf  -max    -1    -0     0     1   max   inf   nan
          -inf  -inf  -inf  -inf  -inf  -inf  -inf  -inf   nan   nan
          -max  -inf  -inf  -max  -max  -max  -max     0   inf   nan
            -1  -inf  -max    -2    -1    -1     0   max   inf   nan
            -0  -inf  -max    -1    -0     0     1   max   inf   nan
             0  -inf  -max    -1     0     0     1   max   inf   nan
             1  -inf  -max     0     1     1     2   max   inf   nan
           max  -inf     0   max   max   max   max   inf   inf   nan
           inf   nan   inf   inf   inf   inf   inf   inf   inf   nan
           nan   nan   nan   nan   nan   nan   nan   nan   nan   nan

subtract        -inf  -max    -1    -0     0     1   max   inf   nan
          -inf   nan  -inf  -inf  -inf  -inf  -inf  -inf  -inf   nan
          -max   inf     0  -max  -max  -max  -max  -inf  -inf   nan
            -1   inf   max     0    -1    -1    -2  -max  -inf   nan
            -0   inf   max     1     0    -0    -1  -max  -inf   nan
             0   inf   max     1     0     0    -1  -max  -inf   nan
             1   inf   max     2     1     1     0  -max  -inf   nan
           max   inf   inf   max   max   max   max     0  -inf   nan
           inf   inf   inf   inf   inf   inf   inf   inf   nan   nan
           nan   nan   nan   nan   nan   nan   nan   nan   nan   nan

multiply        -inf  -max    -1    -0     0     1   max   inf   nan
          -inf   inf   inf   inf   nan   nan  -inf  -inf  -inf   nan
          -max   inf   inf   max     0    -0  -max  -inf  -inf   nan
            -1   inf   max     1     0    -0    -1  -max  -inf   nan
            -0   nan     0     0     0    -0    -0    -0   nan   nan
             0   nan    -0    -0    -0     0     0     0   nan   nan
             1  -inf  -max    -1    -0     0     1   max   inf   nan
           max  -inf  -inf  -max    -0     0   max   inf   inf   nan
           inf  -inf  -inf  -inf   nan   nan   inf   inf   inf   nan
           nan   nan   nan   nan   nan   nan   nan   nan   nan   nan

divide          -inf  -max    -1    -0     0     1   max   inf   nan
          -inf   nan   inf   inf   inf  -inf  -inf  -inf   nan   nan
          -max     0     1   max   inf  -inf  -max    -1    -0   nan
            -1     0     ~     1   inf  -inf    -1     ~    -0   nan
            -0     0     0     0   nan   nan    -0    -0    -0   nan
             0    -0    -0    -0   nan   nan     0     0     0   nan
             1    -0     ~    -1  -inf   inf     1     ~     0   nan
           max    -0    -1  -max  -inf   inf   max     1     0   nan
           inf   nan  -inf  -inf  -inf   inf   inf   inf   nan   nan
           nan   nan   nan   nan   nan   nan   nan   nan   nan   nan

power           -inf  -max    -1    -0     0     1   max   inf   nan
          -inf     0     0    -0     1     1  -inf   inf   inf   nan
          -max     0     0     ~     1     1  -max   inf   inf   nan
            -1     1     1    -1     1     1    -1     1     1   nan
            -0   inf   inf  -inf     1     1    -0     0     0   nan
             0   inf   inf   inf     1     1     0     0     0   nan
             1     1     1     1     1     1     1     1     1     1
           max     0     0     ~     1     1   max   inf   inf   nan
           inf     0     0     0     1     1   inf   inf   inf   nan
           nan   nan   nan   nan     1     1   nan   nan   nan   nan

fmod            -inf  -max    -1    -0     0     1   max   inf   nan
          -inf   nan   nan   nan   nan   nan   nan   nan   nan   nan
          -max  -max    -0    -0   nan   nan    -0    -0  -max   nan
            -1    -1    -1    -0   nan   nan    -0    -1    -1   nan
            -0    -0    -0    -0   nan   nan    -0    -0    -0   nan
             0     0     0     0   nan   nan     0     0     0   nan
             1     1     1     0   nan   nan     0     1     1   nan
           max   max     0     0   nan   nan     0     0   max   nan
           inf   nan   nan   nan   nan   nan   nan   nan   nan   nan
           nan   nan   nan   nan   nan   nan   nan   nan   nan   nan

remainder       -inf  -max    -1    -0     0     1   max   inf   nan
          -inf   nan   nan   nan   nan   nan   nan   nan   nan   nan
          -max  -max    -0    -0   nan   nan     0     0   inf   nan
            -1    -1    -1    -0   nan   nan     0   max   inf   nan
            -0    -0    -0    -0   nan   nan     0     0     0   nan
             0    -0    -0    -0   nan   nan     0     0     0   nan
             1  -inf  -max    -0   nan   nan     0     1     1   nan
           max  -inf    -0    -0   nan   nan     0     0   max   nan
           inf   nan   nan   nan   nan   nan   nan   nan   nan   nan
           nan   nan   nan   nan   nan   nan   nan   nan   nan   nan

floor_divide    -inf  -max    -1    -0     0     1   max   inf   nan
          -inf   nan   nan   nan   inf  -inf   nan   nan   nan   nan
          -max     0     1   max   inf  -inf  -max    -1    -1   nan
            -1     0     0     1   inf  -inf    -1    -1    -1   nan
            -0     0     0     0   nan   nan    -0    -0    -0   nan
             0    -0    -0    -0   nan   nan     0     0     0   nan
             1    -1    -1    -1  -inf   inf     1     0     0   nan
           max    -1    -1  -max  -inf   inf   max     1     0   nan
           inf   nan   nan   nan  -inf   inf   nan   nan   nan   nan
           nan   nan   nan   nan   nan   nan   nan   nan   nan   nan

maximum         -inf  -max    -1    -0     0     1   max   inf   nan
          -inf  -inf  -max    -1    -0     0     1   max   inf   nan
          -max  -max  -max    -1    -0     0     1   max   inf   nan
            -1    -1    -1    -1    -0     0     1   max   inf   nan
            -0    -0    -0    -0    -0   +-0     1   max   inf   nan
             0     0     0     0   +-0     0     1   max   inf   nan
             1     1     1     1     1     1     1   max   inf   nan
           max   max   max   max   max   max   max   max   inf   nan
           inf   inf   inf   inf   inf   inf   inf   inf   inf   nan
           nan   nan   nan   nan   nan   nan   nan   nan   nan   nan

minimum         -inf  -max    -1    -0     0     1   max   inf   nan
          -inf  -inf  -inf  -inf  -inf  -inf  -inf  -inf  -inf   nan
          -max  -inf  -max  -max  -max  -max  -max  -max  -max   nan
            -1  -inf  -max    -1    -1    -1    -1    -1    -1   nan
            -0  -inf  -max    -1    -0   +-0    -0    -0    -0   nan
             0  -inf  -max    -1   +-0     0     0     0     0   nan
             1  -inf  -max    -1    -0     0     1     1     1   nan
           max  -inf  -max    -1    -0     0     1   max   max   nan
           inf  -inf  -max    -1    -0     0     1   max   inf   nan
           nan   nan   nan   nan   nan   nan   nan   nan   nan   nan

arctan2         -inf   -max     -1     -0      0      1    max    inf    nan
          -inf -3pi/4  -pi/2  -pi/2  -pi/2  -pi/2  -pi/2  -pi/2  -pi/4    nan
          -max    -pi -3pi/4  -pi/2  -pi/2  -pi/2  -pi/2  -pi/4     -0    nan
            -1    -pi    -pi -3pi/4  -pi/2  -pi/2  -pi/4      ~     -0    nan
            -0    -pi    -pi    -pi    -pi     -0     -0     -0     -0    nan
             0     pi     pi     pi     pi      0      0      0      0    nan
             1     pi     pi  3pi/4   pi/2   pi/2   pi/4      ~      0    nan
           max     pi  3pi/4   pi/2   pi/2   pi/2   pi/2   pi/4      0    nan
           inf  3pi/4   pi/2   pi/2   pi/2   pi/2   pi/2   pi/2   pi/4    nan
           nan    nan    nan    nan    nan    nan    nan    nan    nan    nan

logaddexp       -inf  -max    -1    -0     0     1   max   inf   nan
          -inf  -inf  -max    -1   +-0   +-0     1   max   inf   nan
          -max  -max  -max    -1   +-0   +-0     1   max   inf   nan
            -1    -1    -1     ~     ~     ~     ~   max   inf   nan
            -0   +-0   +-0     ~   ln2   ln2     ~   max   inf   nan
             0   +-0   +-0     ~   ln2   ln2     ~   max   inf   nan
             1     1     1     ~     ~     ~     ~   max   inf   nan
           max   max   max   max   max   max   max   max   inf   nan
           inf   inf   inf   inf   inf   inf   inf   inf   inf   nan
           nan   nan   nan   nan   nan   nan   nan   nan   nan   nan

greater         -inf  -max    -1    -0     0     1   max   inf   nan
          -inf     0     0     0     0     0     0     0     0     0
          -max     1     0     0     0     0     0     0     0     0
            -1     1     1     0     0     0     0     0     0     0
            -0     1     1     1     0     0     0     0     0     0
             0     1     1     1     0     0     0     0     0     0
             1     1     1     1     1     1     0     0     0     0
           max     1     1     1     1     1     1     0     0     0
           inf     1     1     1     1     1     1     1     0     0
           nan     0     0     0     0     0     0     0     0     0

greater_equal   -inf  -max    -1    -0     0     1   max   inf   nan
          -inf     1     0     0     0     0     0     0     0     0
          -max     1     1     0     0     0     0     0     0     0
            -1     1     1     1     0     0     0     0     0     0
            -0     1     1     1     1     1     0     0     0     0
             0     1     1     1     1     1     0     0     0     0
             1     1     1     1     1     1     1     0     0     0
           max     1     1     1     1     1     1     1     0     0
           inf     1     1     1     1     1     1     1     1     0
           nan     0     0     0     0     0     0     0     0     0

less            -inf  -max    -1    -0     0     1   max   inf   nan
          -inf     0     1     1     1     1     1     1     1     0
          -max     0     0     1     1     1     1     1     1     0
            -1     0     0     0     1     1     1     1     1     0
            -0     0     0     0     0     0     1     1     1     0
             0     0     0     0     0     0     1     1     1     0
             1     0     0     0     0     0     0     1     1     0
           max     0     0     0     0     0     0     0     1     0
           inf     0     0     0     0     0     0     0     0     0
           nan     0     0     0     0     0     0     0     0     0

less_equal      -inf  -max    -1    -0     0     1   max   inf   nan
          -inf     1     1     1     1     1     1     1     1     0
          -max     0     1     1     1     1     1     1     1     0
            -1     0     0     1     1     1     1     1     1     0
            -0     0     0     0     1     1     1     1     1     0
             0     0     0     0     1     1     1     1     1     0
             1     0     0     0     0     0     1     1     1     0
           max     0     0     0     0     0     0     1     1     0
           inf     0     0     0     0     0     0     0     1     0
           nan     0     0     0     0     0     0     0     0     0

equal           -inf  -max    -1    -0     0     1   max   inf   nan
          -inf     1     0     0     0     0     0     0     0     0
          -max     0     1     0     0     0     0     0     0     0
            -1     0     0     1     0     0     0     0     0     0
            -0     0     0     0     1     1     0     0     0     0
             0     0     0     0     1     1     0     0     0     0
             1     0     0     0     0     0     1     0     0     0
           max     0     0     0     0     0     0     1     0     0
           inf     0     0     0     0     0     0     0     1     0
           nan     0     0     0     0     0     0     0     0     0

not_equal       -inf  -max    -1    -0     0     1   max   inf   nan
          -inf     0     1     1     1     1     1     1     1     1
          -max     1     0     1     1     1     1     1     1     1
            -1     1     1     0     1     1     1     1     1     1
            -0     1     1     1     0     0     1     1     1     1
             0     1     1     1     0     0     1     1     1     1
             1     1     1     1     1     1     0     1     1     1
           max     1     1     1     1     1     1     0     1     1
           inf     1     1     1     1     1     1     1     0     1
           nan     1     1     1     1     1     1     1     1     1

logical_and     -inf  -max    -1    -0     0     1   max   inf   nan
          -inf     1     1     1     0     0     1     1     1     1
          -max     1     1     1     0     0     1     1     1     1
            -1     1     1     1     0     0     1     1     1     1
            -0     0     0     0     0     0     0     0     0     0
             0     0     0     0     0     0     0     0     0     0
             1     1     1     1     0     0     1     1     1     1
           max     1     1     1     0     0     1     1     1     1
           inf     1     1     1     0     0     1     1     1     1
           nan     1     1     1     0     0     1     1     1     1

logical_or      -inf  -max    -1    -0     0     1   max   inf   nan
          -inf     1     1     1     1     1     1     1     1     1
          -max     1     1     1     1     1     1     1     1     1
            -1     1     1     1     1     1     1     1     1     1
            -0     1     1     1     0     0     1     1     1     1
             0     1     1     1     0     0     1     1     1     1
             1     1     1     1     1     1     1     1     1     1
           max     1     1     1     1     1     1     1     1     1
           inf     1     1     1     1     1     1     1     1     1
           nan     1     1     1     1     1     1     1     1     1

safe_multiply   -inf  -max    -1    -0     0     1   max   inf   nan
          -inf   inf   inf   inf   nan   nan  -inf  -inf  -inf   nan
          -max   inf   inf   max     0    -0  -max  -inf  -inf   nan
            -1   inf   max     1     0    -0    -1  -max  -inf   nan
            -0   nan     0     0     0    -0    -0    -0   nan   nan
             0   nan    -0    -0    -0     0     0     0   nan   nan
             1  -inf  -max    -1    -0     0     1   max   inf   nan
           max  -inf  -inf  -max    -0     0   max   inf   inf   nan
           inf  -inf  -inf  -inf   nan   nan   inf   inf   inf   nan
           nan   nan   nan   nan   nan   nan   nan   nan   nan   nan

safe_divide     -inf  -max    -1    -0     0     1   max   inf   nan
          -inf   nan   inf   inf   inf  -inf  -inf  -inf   nan   nan
          -max   nan     1   max   inf  -inf  -max    -1   nan   nan
            -1   nan nan(~)     1   inf  -inf    -1 nan(~)   nan   nan
            -0     0     0     0   nan   nan    -0    -0    -0   nan
             0    -0    -0    -0   nan   nan     0     0     0   nan
             1   nan nan(~)    -1  -inf   inf     1 nan(~)   nan   nan
           max   nan    -1  -max  -inf   inf   max     1   nan   nan
           inf   nan  -inf  -inf  -inf   inf   inf   inf   nan   nan
           nan   nan   nan   nan   nan   nan   nan   nan   nan   nan

log_relative    -inf  -max    -1    -0     0     1   max   inf   nan
          -inf  -inf  -inf  -inf  -inf  -inf  -inf  -inf  -inf  -inf
          -max   nan   nan   nan  -inf  -inf     0     ~   inf   nan
            -1   nan   nan   nan  -inf  -inf     0     ~   inf   nan
            -0   nan   nan   nan  -inf  -inf     0     ~   inf   nan
             0   nan   nan   nan  -inf  -inf     0     ~   inf   nan
             1   nan   nan   nan  -inf  -inf     0     ~   inf   nan
           max   nan   nan   nan  -inf  -inf     0     ~   inf   nan
           inf   inf   inf   inf   inf   inf   inf   inf   inf   inf
           nan   nan   nan   nan   nan   nan   nan   nan   nan   nan

plus_log        -inf  -max    -1    -0     0     1   max   inf   nan
          -inf  -inf  -inf  -inf  -inf  -inf  -inf  -inf  -inf  -inf
          -max   nan   nan   nan  -inf  -inf  -max  -max   inf   nan
            -1   nan   nan   nan  -inf  -inf    -1     ~   inf   nan
            -0   nan   nan   nan  -inf  -inf     0     ~   inf   nan
             0   nan   nan   nan  -inf  -inf     0     ~   inf   nan
             1   nan   nan   nan  -inf  -inf     1     ~   inf   nan
           max   nan   nan   nan  -inf  -inf   max   max   inf   nan
           inf   inf   inf   inf   inf   inf   inf   inf   inf   inf
           nan   nan   nan   nan   nan   nan   nan   nan   nan   nan

"""
