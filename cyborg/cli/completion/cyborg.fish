
function __cyborg_lines --argument-names kind key
    set -l start (string escape --style=regex -- "$kind|$key|")
    string replace --filter --regex -- "^$start" '' $__cyborg_data
end

function __cyborg_complete
    set -l words (commandline --tokenize --cut-at-cursor --current-process)
    set -l current (commandline --current-token --cut-at-cursor)
    set -l at ''
    set -l name ''
    set -l option ''
    for word in $words[2..]
        if test -n "$option"
            set option ''
        else if string match --quiet -- '-*' $word
            contains -- "v|$name $word|" $__cyborg_data; and set option $word
        else
            set -l longer (string trim -- "$at $word")
            set -l found (__cyborg_lines p $longer)
            if test (count $found) -gt 0
                set at $longer
                set name $found[1]
            end
        end
    end
    set -l prefix ''
    if test -z "$option"; and string match --quiet --regex -- '^--[^=]+=' $current
        set -l parts (string split --max 1 = -- $current)
        if contains -- "v|$name $parts[1]|" $__cyborg_data
            set option $parts[1]
            set prefix "$option="
            set current $parts[2]
        end
    end
    if test -n "$option"
        set -l values (__cyborg_lines c "$name $option")
        if test (count $values) -gt 0
            printf '%s\n' "$prefix"$values
        else
            for path in (__fish_complete_path $current)
                echo "$prefix$path"
            end
        end
    else if string match --quiet -- '-*' $current
        __cyborg_lines o $name
    else
        __cyborg_lines w $at
    end
end

complete --command cyborg --no-files --arguments '(__cyborg_complete)'
